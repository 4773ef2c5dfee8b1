"""A fork of a state goes on as if it had run the first tokens itself, and nobody else notices."""
# pyright: reportPrivateUsage=false
# Which layers a stage runs on is nobody's business but this test's.

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet.generation import Sampling
from meshnet.model import loading
from meshnet.model.interface import CacheState, StageStep
from meshnet.model.layers import key_value_cache
from meshnet.model.layers.key_value_cache import BLOCK_TOKENS, KeysValues
from meshnet.model.layers.lean import LeanLayers
from meshnet.model.layers.reading import NotLean
from meshnet.model.torch_stage import TorchStage
from meshnet.topology import LayerSpan
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer
from tests.support.tiny import save_tiny

pytestmark = pytest.mark.mesh

PROMPT = [5, 17, 33, 2, 9, 4, 1, 50, 60, 7, 8, 9]
N_TOKENS = 12


def load(folder: Path) -> TorchStage:
    plan = loading.plan_stage(str(folder), LayerSpan(0, 4), "float32", n_threads=1)
    return plan.load()


@pytest.fixture
def load_plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], TorchStage]:
    """Loads a stage that runs by the family's own forward, whatever it is."""

    def refuse(*_: object) -> LeanLayers:
        raise NotLean("not for this test")

    def load_so(folder: Path) -> TorchStage:
        with monkeypatch.context() as patch:
            patch.setattr("meshnet.model.torch_stage.read_lean_layers", refuse)
            return load(folder)

    return load_so


def fed(stage: TorchStage, ids: Sequence[int]) -> CacheState:
    """A state of these tokens, run in one call."""
    state = stage.new_state(0)
    stage.run(StageStep(Frame.of_token_ids(ids), 0, 0), state)
    return state


def said(stage: TorchStage, state: CacheState, n_held: int, *next_ids: int) -> list[int]:
    """What follows, beginning with one call of `next_ids`."""
    ids, position = list(next_ids), n_held
    told: list[int] = []
    for _ in range(N_TOKENS):
        step = StageStep(Frame.of_token_ids(ids), 0, position, sampling=Sampling())
        answer = stage.run(step, state)
        assert isinstance(answer, TailAnswer)
        assert answer.token_id is not None
        position, ids = position + len(ids), [answer.token_id]
        told += ids
    return told


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("n_shared", [5, len(PROMPT)])
def test_a_fork_says_what_it_would_alone(tmp_path: Path, family: str, n_shared: int) -> None:
    """Two forks and what they are of, each with other tokens behind the same ones."""
    save_tiny(tmp_path, family, 4, tied=False)
    stage = load(tmp_path)
    assert isinstance(stage._layers, LeanLayers)
    parent = fed(stage, PROMPT)
    forks = [parent.fork(n_shared) for _ in range(2)]
    shared = PROMPT[:n_shared]

    told = [said(stage, parent, len(PROMPT), 21)]
    for fork, ids in zip(forks, ([30, 31, 32], [40]), strict=True):
        assert fork is not None
        told.append(said(stage, fork, n_shared, *ids))

    assert told[0] == said(stage, fed(stage, PROMPT), len(PROMPT), 21)
    assert told[1] == said(stage, fed(stage, shared), n_shared, 30, 31, 32)
    assert told[2] == said(stage, fed(stage, shared), n_shared, 40)


def test_a_fork_of_a_familys_own_cache(
    tmp_path: Path, load_plain: Callable[[Path], TorchStage]
) -> None:
    """Where all layers keep all keys; the fork comes to take what a state of its own would."""
    save_tiny(tmp_path, "llama", 4, tied=False)
    stage = load_plain(tmp_path)
    parent = fed(stage, PROMPT)
    fork = parent.fork(5)
    assert fork is not None
    alone = fed(stage, PROMPT[:5])

    assert said(stage, fork, 5, 30) == said(stage, alone, 5, 30)
    assert fork.nbytes == alone.nbytes
    assert said(stage, parent, 12, 21) == said(stage, fed(stage, PROMPT), 12, 21)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma2"])
def test_a_cache_that_forgets_cannot_be_forked(
    tmp_path: Path, load_plain: Callable[[Path], TorchStage], family: str
) -> None:
    """What slides in a family's own cache has no state of fewer tokens."""
    save_tiny(tmp_path, family, 4, tied=False)

    assert fed(load_plain(tmp_path), PROMPT).fork(5) is None


def test_a_fork_reaches_back_as_far_as_memory_does(tmp_path: Path) -> None:
    """A lean window's earlier tokens can be had until they are moved away."""
    save_tiny(tmp_path, "mistral", 4, tied=False)
    stage = load(tmp_path)
    state = fed(stage, [1 + i % 60 for i in range(BLOCK_TOKENS - 1)])
    near, first = state.fork(BLOCK_TOKENS - 2), state.fork(1)
    said(stage, state, BLOCK_TOKENS - 1, 7)

    assert None not in (near, first)
    assert (state.fork(1), state.fork(BLOCK_TOKENS - 9)) == (None, None)
    assert state.fork(BLOCK_TOKENS + 2) is not None


# --- one layer, by its numbers ---


def rows(start: int, n_tokens: int, mark: float = 0.0) -> torch.Tensor:
    """[n, 2 * heads, head_dim=1] of one head: each token's position, and whose it is."""
    numbers = torch.arange(start, start + n_tokens).float() + mark
    return numbers.view(n_tokens, 1, 1).repeat(1, 2, 1)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.data())
def test_neither_sees_what_the_other_writes(lengths: list[int], data: st.DataObject) -> None:
    """Whoever writes first, and however often memory is taken anew."""
    parent, position = KeysValues(1, 1, torch.float32), 0
    for n_tokens in lengths:
        parent.write(position, rows(position, n_tokens))
        position += n_tokens
    at = data.draw(st.integers(1, position))
    fork = parent.fork(at)
    assert fork is not None
    ends = {0.25: position, 0.5: at}
    for mark in data.draw(st.lists(st.sampled_from([0.25, 0.5]), min_size=2, max_size=6)):
        cache, n_tokens = (parent, fork)[mark == 0.5], data.draw(st.integers(1, 70))
        new = rows(ends[mark], n_tokens, mark)
        keys, values = cache.write(ends[mark], new)
        begin = position if mark == 0.25 else at
        ends[mark] += n_tokens
        expected = torch.cat([rows(0, begin), rows(begin, ends[mark] - begin, mark)])[:, 0]
        assert torch.equal(keys.flatten(), expected.flatten())
        assert torch.equal(values, keys)


def between_lines(names: Sequence[str], act: Callable[[], object]) -> None:
    """From now on have something done before each line of these functions, as a thread might.

    What is done is not traced itself.
    """

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != key_value_cache.__file__:
            return None
        if event == "line" and frame.f_code.co_name in names:
            act()
        return trace

    sys.settrace(trace)


@pytest.fixture
def restored_trace() -> Generator[None]:
    usual = sys.gettrace()
    yield
    sys.settrace(usual)


class Writer:
    """Writes tokens one by one, each its position, to a layer that holds some already."""

    def __init__(self, window: int | None, n_tokens: int) -> None:
        self.cache = KeysValues(1, 1, torch.float32, window)
        self.n_tokens = n_tokens
        self._window = window
        self.cache.write(0, rows(0, n_tokens))
        self.cache.settle(n_tokens)

    def write(self, n_tokens: int) -> None:
        for _ in range(n_tokens):
            new = rows(self.n_tokens, 1)
            self.cache.write(self.n_tokens, new)
            self.n_tokens += 1

    def check(self, fork: KeysValues, at: int) -> None:
        """A fork at so many tokens has what it looks at, and goes on."""
        new = rows(at, 1, 0.5)
        keys, values = fork.write(at, new)
        oldest = 0 if self._window is None else max(0, at - self._window + 1)
        expected = torch.cat([rows(oldest, at - oldest), new])[:, 0]
        assert torch.equal(keys.flatten(), expected.flatten())
        assert torch.equal(values, keys)


@pytest.mark.usefixtures("restored_trace")
@pytest.mark.parametrize("window", [None, 40])
def test_a_fork_is_right_whatever_is_written_while_it_is_made(window: int | None) -> None:
    """Between any two lines of it the other one may have moved to other memory."""
    n_right = 0
    for n_tokens in range(100, 170, 3):
        writer = Writer(window, n_tokens)
        between_lines(["fork", "_oldest"], lambda writer=writer: writer.write(9))
        fork = writer.cache.fork(n_tokens)
        sys.settrace(None)
        assert writer.n_tokens > n_tokens + 30
        if fork is not None:
            writer.check(fork, n_tokens)
            n_right += 1

    assert n_right > 5


@pytest.mark.usefixtures("restored_trace")
@pytest.mark.parametrize("window", [None, 40])
def test_a_fork_is_right_wherever_the_other_one_is_in_its_writing(window: int | None) -> None:
    """Made between any two lines of a write it has the tokens of the writes before."""
    writer = Writer(window, 100)
    made: list[tuple[int, KeysValues]] = []

    def fork() -> None:
        one = writer.cache.fork(writer.n_tokens)
        if one is not None:
            made.append((writer.n_tokens, one))

    between_lines(["write", "_make_room", "_seen"], fork)
    writer.write(150)
    sys.settrace(None)

    assert len(made) > 1000
    for at, one in made:
        writer.check(one, at)
