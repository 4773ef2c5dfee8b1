from __future__ import annotations

import json

import pytest

from services.head.api_keys import ApiKeys, Caller
from services.head.settings import ApiKeySetting
from tests.unit.cli.running import run


def test_a_key_and_what_a_head_is_to_know_of_it() -> None:
    """The first line is a key that the head knows by the second, which holds nothing of it."""
    ended = run("key", "alice", "--rate-limit", "60/minute")
    key, line = ended.out.splitlines()
    setting = ApiKeySetting.model_validate_json(line)

    assert (ended.code, setting.name, setting.rate_limit) == (0, "alice", "60/minute")
    caller = ApiKeys([Caller(setting.name, setting.sha256)]).caller(key)
    assert caller is not None
    assert caller.name == "alice"
    assert key not in line


def test_a_key_without_a_limit() -> None:
    """No limit is none in the line."""
    _, line = run("key", "bob").out.splitlines()

    assert json.loads(line).keys() == {"name", "sha256"}


def test_keys_are_new_and_long() -> None:
    """Each key is another one, of 256 random bits in 43 characters."""
    keys = {run("key", "bob").out.splitlines()[0] for _ in range(3)}

    assert [len(key) for key in keys] == [len("mesh_") + 43] * 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["key"], ["Missing argument"]),
        (["key", "a b"], ["NAME"]),
        (["key", "alice", "--rate-limit", "often"], ["--rate-limit", "'often'", "N/minute"]),
    ],
)
def test_a_bad_key_is_one_line(arguments: list[str], words: list[str]) -> None:
    """What cannot be a key's name or limit makes no key."""
    ended = run(*arguments)

    assert (ended.code, len(ended.error_lines), ended.out) == (2, 1, "")
    assert [word for word in words if word not in ended.error_lines[0]] == []
