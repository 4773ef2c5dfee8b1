"""A kill every 20 tokens in bfloat16, and not a bit is different.

`python -m benchmarks.exact MODEL_FOLDER [--tokens 400] [--every 20]`: two shards, killed in
turn while they answer, and started again. Compares every token, and every hidden state that the
first shard gives to the second, with an undisturbed run. Exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.library_head import LibraryHead, WatchedHop, open_hops, open_library_head
from benchmarks.results import RESULTS, write_result
from meshnet.head.hop_client import HopAnswer, HopClient
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.topology import even_spans
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from services.cli.cluster import LocalCluster

QUESTION = "Write a long story about a lighthouse keeper and a lost ship."


class HashingHop(WatchedHop):
    """Keeps a digest of the last hidden states that came out at each position."""

    def __init__(self, inner: HopClient) -> None:
        super().__init__(inner)
        self.digests: dict[int, str] = {}

    async def step(
        self, step: StepHeaders, body: bytes, *, limit_s: float, max_answer_bytes: int
    ) -> HopAnswer:
        answer = await super().step(step, body, limit_s=limit_s, max_answer_bytes=max_answer_bytes)
        if isinstance(answer.result, Frame):
            self.digests[step.past_len] = hashlib.sha256(answer.result.data).hexdigest()
        return answer


@dataclass(frozen=True)
class Exactness:
    """What came of one comparison."""

    dtype: str
    n_tokens: int
    kills: int
    failures_mended: int
    replayed_layer_tokens: int
    tokens_different: int
    hidden_states_compared: int
    hidden_states_different: int
    undisturbed_s: float
    disturbed_s: float

    @property
    def holds(self) -> bool:
        """Whether nothing differs, and something was lost at all."""
        different = self.tokens_different + self.hidden_states_different
        return not different and self.failures_mended >= self.kills > 0


async def compare(model: Path, *, dtype: str, n_tokens: int, every: int) -> Exactness:
    """Generate twice, the second time with a kill every so many tokens."""
    prompt = ChatTokenizer.load(str(model)).encode_chat([{"role": "user", "content": QUESTION}])
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        cluster = await stack.enter_async_context(
            LocalCluster(str(model), even_spans(30, 2), dtype=dtype, threads=1, log_dir=logs)
        )
        hops = [HashingHop(hop) for hop in await stack.enter_async_context(open_hops(cluster))]
        head = await stack.enter_async_context(open_library_head(cluster, hops))
        expected, undisturbed_s = await _timed(head, prompt, n_tokens)
        hidden, hops[0].digests = hops[0].digests, {}
        killer = _Killer(cluster, n_tokens, every)
        tokens, disturbed_s = await _timed(head, prompt, n_tokens, killer)
        return Exactness(
            dtype=dtype,
            n_tokens=n_tokens,
            kills=killer.kills,
            failures_mended=len(head.failures),
            replayed_layer_tokens=head.replayed_layer_tokens,
            tokens_different=sum(a != b for a, b in zip(tokens, expected, strict=True)),
            hidden_states_compared=len(hidden),
            hidden_states_different=sum(hops[0].digests.get(at) != hidden[at] for at in hidden),
            undisturbed_s=round(undisturbed_s, 1),
            disturbed_s=round(disturbed_s, 1),
        )


@dataclass
class _Killer:
    """Kills the shards in turn, one every so many tokens, but not after the last."""

    cluster: LocalCluster
    n_tokens: int
    every: int
    kills: int = 0

    def __call__(self, n_generated: int) -> None:
        if n_generated % self.every == 0 and n_generated < self.n_tokens:
            self.cluster.shards[self.kills % len(self.cluster.shards)].kill()
            self.kills += 1


async def _timed(
    head: LibraryHead, prompt: list[int], n_tokens: int, killer: _Killer | None = None
) -> tuple[list[int], float]:
    started_at = perf_counter()
    tokens = await head.generate(prompt, n_tokens, on_token=killer or (lambda _: None))
    return tokens, perf_counter() - started_at


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    result = asyncio.run(
        compare(
            options.model.resolve(), dtype="bfloat16", n_tokens=options.tokens, every=options.every
        )
    )
    for name, value in asdict(result).items():
        print(f"{name:26} {value}")
    print("bit-identical" if result.holds else "NOT bit-identical")
    write_result(RESULTS / "exact.json", asdict(result))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
