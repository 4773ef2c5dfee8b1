from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshnet.topology import LayerSpan, even_spans
from meshnet.wire.messages import ShardReadiness
from services.cli import cluster as cluster_module
from services.cli.cluster import ClusterError, ClusterWatcher, LocalCluster

STAND_IN = (sys.executable, "-m", "tests.unit.cli.stand_in")


class Notes(ClusterWatcher):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.states: dict[str, ShardReadiness] = {}

    def loading(self, name: str, readiness: ShardReadiness) -> None:
        self.states[name] = readiness

    def note(self, line: str) -> None:
        self.lines.append(line)


def _cluster(model: str, folder: Path, notes: Notes | None = None, **options: Any) -> LocalCluster:  # noqa: ANN401  # handed on
    spans = options.pop("spans", even_spans(30, 2))
    return LocalCluster(model, spans, log_dir=folder, watcher=notes, program=STAND_IN, **options)


async def _until(true: Callable[[], bool], limit_s: float = 20) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110  # other processes set no Event
            await asyncio.sleep(0.02)


async def _is_up(url: str) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{url}/readyz")).is_success
    except httpx.TransportError:
        return False


async def test_members_run_until_the_end(tmp_path: Path) -> None:
    """Inside, every member takes requests; afterwards none is there."""
    notes = Notes()
    async with _cluster("good", tmp_path, notes) as cluster:
        urls = [member.url for member in cluster.members]
        assert [await _is_up(url) for url in urls] == [True] * 3
        assert {"shard-1", "shard-2", "head"} == set(notes.states)
    assert [await _is_up(url) for url in urls] == [False] * 3
    assert [member.returncode for member in cluster.members] == [-signal.SIGTERM] * 3
    assert notes.lines == []


async def test_what_members_are_told(tmp_path: Path) -> None:
    """Each shard gets its span, the head the shards' addresses, and nobody a key to see."""
    spans = [LayerSpan(0, 4), LayerSpan(4, 5)]
    async with _cluster(
        "good", tmp_path, spans=spans, dtype="bfloat16", weights="int8", threads=3
    ) as cluster:
        commands = [" ".join(member.last_log_lines()) for member in cluster.members]
    options = "--model good --dtype bfloat16 --weights int8 --threads 3 --port "
    assert f"shard --layers 0-4 {options}" in commands[0]
    assert "shard --layers 4-5 " in commands[1]
    route = ",".join(shard.url for shard in cluster.shards)
    assert f"head --model good --route {route} --port " in commands[2]
    assert f"{cluster.head_url}/v1" == cluster.base_url
    assert not any(cluster.cluster_key in command for command in commands)


async def test_the_key_reaches_members_by_environment(tmp_path: Path) -> None:
    """Head and shards hold the same key, and the settings that were given."""
    async with _cluster("good", tmp_path, cluster_key="k", env={"MESHNET_X": "1"}) as cluster:
        for member in cluster.members:
            environ = await asyncio.to_thread(Path(f"/proc/{member.pid}/environ").read_text)
            expected = {"MESHNET_SHARD_CLUSTER_KEY=k", "MESHNET_HEAD_CLUSTER_KEY=k", "MESHNET_X=1"}
            assert expected <= set(environ.split("\0"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("dying", ["ended with exit code 1"]),
        ("bad", ["shard-", "failed: a tensor is missing"]),
        ("slow", ["shard-", "was not ready after 3 s"]),
    ],
)
async def test_a_member_that_cannot_load_stops_all(
    tmp_path: Path, model: str, words: list[str]
) -> None:
    """If one member ends, fails or hangs while loading, all are stopped, and the reason told."""
    cluster = _cluster(model, tmp_path, load_limit_s=3)
    with pytest.raises(ClusterError) as raised:
        async with cluster:
            pass
    assert [word for word in words if word not in raised.value.message] == []
    assert any(model in line for line in raised.value.log_lines)
    assert None not in [member.returncode for member in cluster.members]


async def test_a_member_that_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed shard is started again on its port, and both are told."""
    monkeypatch.setattr(cluster_module, "_FIRST_DELAY_S", 0.05)
    notes = Notes()
    async with _cluster("good", tmp_path, notes) as cluster:
        shard = cluster.shards[1]
        first = shard.pid
        shard.kill()
        await _until(lambda: len(notes.lines) == 2)
        assert await _is_up(shard.url)
        assert first != shard.pid
    assert [line.removeprefix("shard-2 ").partition(";")[0] for line in notes.lines] == [
        "was ended by SIGKILL",
        "is ready again",
    ]


async def test_a_member_that_does_not_come_back_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that fails is told, and is not the last."""
    monkeypatch.setattr(cluster_module, "_FIRST_DELAY_S", 0.01)
    notes = Notes()
    async with _cluster("good", tmp_path, notes) as cluster:
        start, failures = cluster.head.start, iter([OSError("no memory"), OSError("no memory")])

        async def fail_twice() -> None:
            for failure in failures:
                raise failure
            await start()

        monkeypatch.setattr(cluster.head, "start", fail_twice)
        cluster.head.kill()
        await _until(lambda: bool(notes.lines) and "ready again" in notes.lines[-1])
    assert sum("did not come back: no memory" in line for line in notes.lines) == 2


async def test_a_test_may_start_members_itself(tmp_path: Path) -> None:
    """Without restarts a killed member stays away until it is started, on the same port."""
    notes = Notes()
    async with _cluster("good", tmp_path, notes, restart=False) as cluster:
        shard = cluster.shards[0]
        shard.kill()
        assert await shard.wait() == -signal.SIGKILL
        assert not await _is_up(shard.url)
        await shard.start()
        await cluster.wait_ready(shard)
        assert await _is_up(shard.url)
    assert notes.lines == []


async def test_cancelled_while_loading(tmp_path: Path) -> None:
    """Breaking off the start stops what was started."""
    cluster = _cluster("slow", tmp_path)
    entering = asyncio.create_task(cluster.__aenter__())
    await _until(lambda: bool(cluster.head.last_log_lines()))
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert None not in [member.returncode for member in cluster.members]
