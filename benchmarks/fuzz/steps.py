"""Well-formed steps for one shard, which the fuzzer then spoils."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random
from typing import Final

from benchmarks.fuzz.raw_http import Request
from meshnet.generation import Sampling
from meshnet.wire import headers
from meshnet.wire.messages import ShardInfo

HOT: Final = Sampling(temperature=2.0, seed=7)
"""At this temperature hardly a state is changed without another token being drawn."""


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
