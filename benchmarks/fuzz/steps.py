"""Well-formed steps for one shard, which the fuzzer then spoils."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random
from typing import Final

from benchmarks.fuzz.raw_http import Request
from meshnet.generation import Sampling, SamplingContext
from meshnet.wire import headers
from meshnet.wire.context import render_context
from meshnet.wire.messages import ShardInfo

HOT: Final = Sampling(
    temperature=2.0, seed=7, frequency_penalty=0.5, repetition_penalty=1.1, top_logprobs=2
)
"""At this temperature hardly a state is changed without another token being drawn."""


def with_context(step: Request, context: bytes) -> Request:
    """With this sampling context behind the tensor, instead of any that is there."""
    there = int(dict(step.headers).get(headers.CONTEXT_BYTES.encode(), b"0"))
    tensor = step.body[: len(step.body) - there]
    return step.having(headers.CONTEXT_BYTES, str(len(context))).having_body(tensor + context)


@dataclass(frozen=True)
class StepMaker:
    """Makes steps that a shard takes.

    Attributes:
        info: What the shard says of itself.
        cluster_key: Its key.
    """

    info: ShardInfo
    cluster_key: str

    @property
    def takes_ids(self) -> bool:
        """Whether its steps carry token ids."""
        return self.info.start_layer == 0

    @property
    def is_tail(self) -> bool:
        """Whether it samples."""
        return self.info.end_layer == self.info.n_layers

    @property
    def mask_nbytes(self) -> int:
        """Bytes of a mask of the whole vocabulary."""
        return (self.info.vocab_size + 7) // 8

    def request(self, method: str, path: str) -> Request:
        """A request with the key."""
        key = f"Bearer {self.cluster_key}"
        return Request(method, path).adding("Host", "shard").adding("Authorization", key)

    def closing(self, session: str) -> Request:
        """A closing of a session, in whichever epoch."""
        return self.request("DELETE", f"/v1/sessions/{session}")

    def tensor(self, rng: Random, n_tokens: int, *, ids: bool | None = None) -> bytes:
        """Random token ids, or hidden states of an ordinary size."""
        if self.takes_ids if ids is None else ids:
            return array(
                "i", (rng.randrange(self.info.vocab_size) for _ in range(n_tokens))
            ).tobytes()
        n_numbers = n_tokens * self.info.hidden_size
        return array("f", (rng.gauss(0, 1) for _ in range(n_numbers))).tobytes()

    def shape(self, n_tokens: int, *, ids: bool | None = None) -> str:
        """The shape of such a tensor."""
        takes_ids = self.takes_ids if ids is None else ids
        return f"1,{n_tokens}" if takes_ids else f"1,{n_tokens},{self.info.hidden_size}"

    def context(self, rng: Random) -> bytes:
        """A sampling context of all that a decode can have; half of them have a mask."""

        def ids() -> tuple[int, ...]:
            return tuple(rng.randrange(self.info.vocab_size) for _ in range(rng.randint(1, 20)))

        mask = rng.randbytes(self.mask_nbytes)
        return render_context(
            SamplingContext(
                prompt_ids=ids(),
                generated_ids=ids(),
                logit_bias={token_id: rng.uniform(-100, 100) for token_id in ids()},
                banned_ids=ids(),
                allowed=mask if rng.random() < 0.5 else None,
            )
        )

    def step(
        self, session: str, past_len: int, n_tokens: int, body: bytes, *, step_id: str
    ) -> Request:
        """A cached step; one that continues is a decode."""
        return (
            self.request("POST", "/v1/forward")
            .adding(headers.SESSION, session)
            .adding(headers.CACHE, "decode" if past_len else "prefill")
            .adding(headers.PAST_LEN, str(past_len))
            .adding(headers.SHAPE, self.shape(n_tokens))
            .adding(headers.DTYPE, "int32" if self.takes_ids else self.info.dtype)
            .adding(headers.START_LAYER, str(self.info.start_layer))
            .adding(headers.FINGERPRINT, self.info.fingerprint)
            .adding(headers.STEP, step_id)
            .adding(headers.SAMPLING, HOT.model_dump_json())
            .having_body(body)
        )

    def stateless(self, n_tokens: int, body: bytes) -> Request:
        """A step that leaves nothing behind."""
        step = self.step("none", 0, n_tokens, body, step_id="none")
        return step.having(headers.CACHE, "stateless").without(headers.SESSION)
