from __future__ import annotations

import hashlib
import hmac

import pytest
from pydantic import SecretStr

from services.head import api_keys
from services.head.api_keys import ApiKeys, Caller, api_keys_of, digest_of, new_key
from services.head.settings import ApiKeySetting, HeadSettings, HopSetting

NAMES = ("a", "b", "c")


def keys_of(*names: str) -> ApiKeys:
    """Keys that are their callers' names."""
    return ApiKeys([Caller(name, digest_of(name)) for name in names])


def settings_of(**changed: object) -> HeadSettings:
    base = {"model": "m", "route": [HopSetting(endpoint="http://a:1")]}
    return HeadSettings.model_validate(base | changed)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_has_one_caller(name: str) -> None:
    """Whose key is shown is told by it, wherever it stands."""
    assert keys_of(*NAMES).caller(name) == Caller(name, digest_of(name))


@pytest.mark.parametrize("key", ["", "d", "a ", "A", digest_of("a"), "\u00e9"])
def test_another_key_has_none(key: str) -> None:
    """What is no key, its digest among it, is nobody's."""
    assert keys_of(*NAMES).caller(key) is None


@pytest.mark.parametrize("key", [*NAMES, "d", ""])
def test_every_key_is_compared_in_constant_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key is shown, its digest is compared with all of them, by `compare_digest`."""
    compared: list[str] = []

    def compare(known: str, shown: str) -> bool:
        assert shown == digest_of(key)
        compared.append(known)
        return hmac.compare_digest(known, shown)

    monkeypatch.setattr(api_keys, "compare_digest", compare)
    keys_of(*NAMES).caller(key)

    assert compared == [digest_of(name) for name in NAMES]


def test_a_digest_is_sha_256() -> None:
    """What is configured can be made by any tool: the SHA-256 of the key's UTF-8."""
    assert digest_of("mesh_\u00e9") == hashlib.sha256("mesh_\u00e9".encode()).hexdigest()


def test_without_keys_none_is_asked_for() -> None:
    """A cluster key alone guards the shards, and not the endpoint."""
    assert api_keys_of(settings_of(cluster_key="c")) is None


def test_the_cluster_key_opens_too() -> None:
    """Where there are API keys the cluster's is one of them, without a limit."""
    alice = ApiKeySetting(name="alice", sha256=digest_of("x"), rate_limit="1/minute")
    keys = api_keys_of(settings_of(api_keys=(alice,), cluster_key=SecretStr("c")))
    assert keys is not None
    found = [keys.caller(key) for key in ("x", "c")]

    assert [caller and (caller.name, caller.rate_limit is None) for caller in found] == [
        ("alice", False),
        ("cluster", True),
    ]


def test_without_a_cluster_key_there_is_no_such_caller() -> None:
    """No cluster key is none that could be shown."""
    keys = api_keys_of(settings_of(api_keys=(ApiKeySetting(name="a", sha256=digest_of("x")),)))
    assert keys is not None

    assert (keys.caller("x"), keys.caller("")) == (Caller("a", digest_of("x")), None)


def test_new_keys_are_random() -> None:
    """No two keys are the same."""
    assert len({new_key() for _ in range(100)}) == 100
