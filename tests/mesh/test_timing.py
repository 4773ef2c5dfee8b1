"""A caller that asks is told where the time of its request went, hop by hop."""

from __future__ import annotations

from time import sleep

import httpx
import pytest

from meshnet.model.fake_stage import FakeStage
from meshnet.model.interface import CacheState, StageOutput, StageStep
from services.cli.timing import PARTS, Metrics, parse
from tests.support.http import plain_client
from tests.support.mesh import CLUSTER_KEY, Mesh, body_of, fake_stages, serve_mesh, spell
from tests.support.recorder import SeenStep

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8]
N_TOKENS = 12
SPANS = ((0, 2), (2, 4))
ASKING = {"X-Meshnet-Timing": "1"}
COMMENT = ": server-timing "
SLOW_S = 0.01


class SlowStage(FakeStage):
    """Takes its time."""

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """As the fake stage, later."""
        sleep(SLOW_S)  # on the compute thread
        return super().run(step, state)


async def ask(mesh: Mesh, **parameters: object) -> httpx.Response:
    body = body_of(spell(PROMPT), max_tokens=N_TOKENS, **parameters)
    return await mesh.client.post("/v1/chat/completions", json=body, headers=ASKING)


def durations(metrics: Metrics) -> dict[str, float]:
    return {name: float(told["dur"]) for name, told in metrics.items() if "dur" in told}


def check_sums(metrics: Metrics, *, n_hops: int, n_choices: int = 1) -> None:
    """Nothing is told twice, nothing is left out, and no part is less than nothing."""
    ms = durations(metrics)
    assert min(ms.values()) >= 0
    assert ms["decode"] == pytest.approx(
        ms["decode-head"] + sum(ms[f"decode-{i}"] for i in range(1, n_hops + 1)), abs=0.01
    )
    for phase, n_steps in (("prefill", 1), ("decode", N_TOKENS - 1)):
        assert metrics[phase]["tokens"] == str(n_choices * n_steps)
        for i in range(1, n_hops + 1):
            assert metrics[f"{phase}-{i}"]["steps"] == str(n_choices * n_steps)
            parts = [ms.get(f"{phase}-{i}-{part}", 0.0) for part in PARTS]
            assert ms[f"{phase}-{i}"] == pytest.approx(sum(parts), abs=0.01)


@pytest.mark.parametrize("transport", ["post", "stream"])
async def test_an_answer_in_one_piece_has_a_header(transport: str) -> None:
    """Wait and phases are no more than the whole; each hop did some of each thing."""
    async with serve_mesh(fake_stages(*SPANS), hop_transport=transport) as mesh:
        metrics = parse((await ask(mesh)).headers["server-timing"])
        urls = [shard.url for shard in mesh.shards]
    ms = durations(metrics)

    check_sums(metrics, n_hops=2)
    assert ms["wait"] + ms["prefill"] + ms["decode"] <= ms["total"]
    assert [metrics[f"hop-{i}"]["desc"] for i in (1, 2)] == urls
    for part in ("queue", "compute", "serialise", "wire"):
        assert ms[f"decode-1-{part}"] > 0
        assert ms[f"decode-2-{part}"] > 0


async def test_compute_is_the_shards() -> None:
    """A stage that takes long is seen as that, and on its own hop only."""
    quick, slow = fake_stages(*SPANS)
    async with serve_mesh([quick, SlowStage(slow.facts)]) as mesh:
        ms = durations(parse((await ask(mesh)).headers["server-timing"]))

    assert ms["decode-2-compute"] >= (N_TOKENS - 1) * SLOW_S * 1000
    assert ms["decode-1-compute"] < ms["decode-2-compute"]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_a_stream_tells_it_twice(path: str) -> None:
    """Its head says what the first token took, a comment at its very end all of it."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        body: dict[str, object] = body_of(spell(PROMPT), max_tokens=N_TOKENS, stream=True)
        messages = body.pop("messages")
        if path == "responses":
            body |= {"input": messages, "max_output_tokens": body.pop("max_tokens")}
        else:
            body |= {"messages": messages} if "chat" in path else {"prompt": spell(PROMPT)}
        response = await mesh.client.post(f"/v1/{path}", json=body, headers=ASKING)
    head = parse(response.headers["server-timing"])
    *_, last = (line for line in response.text.splitlines() if line)
    whole = parse(last.removeprefix(COMMENT))

    assert last.startswith(COMMENT)
    check_sums(whole, n_hops=2)
    early, late = durations(head), durations(whole)
    assert "decode" not in early
    assert early["total"] < late["total"]
    assert {name: late[name] for name in early if name != "total"} == {
        name: value for name, value in early.items() if name != "total"
    }


async def test_several_choices_are_added_up() -> None:
    """They run at the same time, so that together they may take longer than the request."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        metrics = parse((await ask(mesh, n=3)).headers["server-timing"])

    check_sums(metrics, n_hops=2, n_choices=3)


async def test_recovery_is_told_apart() -> None:
    """A hop that lost the session counts each step once; what it cost besides stands by itself."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        tail = mesh.shards[1]

        async def forget_once(step: SeenStep) -> None:
            if len(tail.recorder.steps) == N_TOKENS // 2:
                auth = {"authorization": f"Bearer {CLUSTER_KEY}"}
                async with plain_client(tail.url, auth) as client:
                    await client.delete(f"/v1/sessions/{step.session}")

        tail.recorder.before_step = forget_once
        metrics = parse((await ask(mesh)).headers["server-timing"])
    ms = durations(metrics)

    check_sums(metrics, n_hops=2)
    assert ms["decode-2-recovery"] > 0
    assert "decode-1-recovery" not in ms


async def test_nobody_else_is_told() -> None:
    """Without the question there is neither header nor comment."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        whole = await mesh.chat(spell(PROMPT))
        stream = await mesh.chat(spell(PROMPT), stream=True)

    assert "server-timing" not in whole.headers
    assert "server-timing" not in stream.headers
    assert "server-timing" not in stream.text


@pytest.mark.parametrize("value", ["yes", ""])
async def test_another_word_is_refused(value: str) -> None:
    """400 names the header and what it may say."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        response = await mesh.client.post(
            "/v1/chat/completions",
            json=body_of(spell(PROMPT)),
            headers={"X-Meshnet-Timing": value},
        )

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "X-Meshnet-Timing"
    assert "neither 0 nor 1" in error["message"]
