"""Lean layers give what the family's own forward does, alone and in batches, or are not used."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# What a stage runs on is nobody's business but these tests'; transformers types its models loosely.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, PreTrainedConfig

from meshnet.generation import Sampling
from meshnet.model import loading
from meshnet.model.interface import CacheState, StageStep
from meshnet.model.layers.family import FamilyLayers
from meshnet.model.layers.interface import Layers
from meshnet.model.layers.key_value_cache import BLOCK_TOKENS
from meshnet.model.layers.lean import LeanLayers, Norm
from meshnet.model.layers.reading import NotLean
from meshnet.model.torch_stage import TorchStage
from meshnet.model.weights.packing import Packing
from meshnet.topology import LayerSpan
from meshnet.wire.frames import Dtype, Frame
from meshnet.wire.messages import TailAnswer
from tests.support.tiny import WINDOW, save_tiny

pytestmark = pytest.mark.mesh

LEAN_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
N_LAYERS = 4
N_TOKENS = 20
PROMPTS = ([5, 17, 33], [2, 12, 44, 9, 61, 30, 1, 18, 40, 22], [7], [50, 51, 3, 3, 28, 11])
"""Of several lengths, with and beyond the window."""


def load(
    folder: Path,
    span: tuple[int, int] = (0, N_LAYERS),
    packing: Packing | None = None,
    dtype: Dtype = "float32",
) -> TorchStage:
    plan = loading.plan_stage(str(folder), LayerSpan(*span), dtype, packing=packing, n_threads=1)
    return plan.load()


def layers_of(stage: TorchStage) -> Layers:
    return stage._layers


@pytest.fixture
def no_lean(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], TorchStage]:
    """Loads a stage that runs by the family's own forward, whatever it is."""

    def load_plain(folder: Path) -> TorchStage:
        with monkeypatch.context() as patch:
            patch.setattr("meshnet.model.torch_stage.read_lean_layers", _refuse)
            return load(folder)

    return load_plain


def _refuse(*_: object) -> LeanLayers:
    raise NotLean("not for this test")


def step(stage: TorchStage, ids: Sequence[int], position: int) -> StageStep:
    return StageStep(Frame.of_token_ids(ids), stage.facts.span.start, position, sampling=Sampling())


def alone(stage: TorchStage, prompt: list[int], chunk: int = 64) -> list[int]:
    """A prompt's continuation, step by step."""
    state, ids = stage.new_state(0), list(prompt)
    for start in range(0, len(prompt) - 1, chunk):
        some = prompt[:-1][start : start + chunk]
        stage.run(StageStep(Frame.of_token_ids(some), 0, start), state)
    for position in range(len(prompt) - 1, len(prompt) - 1 + N_TOKENS):
        answer = stage.run(step(stage, ids[-1:], position), state)
        ids.append(token(answer))
    return ids[len(prompt) :]


def together(stage: TorchStage, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Every prompt's continuation, all in batches, though none has the length of another."""
    states, texts = [stage.new_state(0) for _ in prompts], [list(prompt) for prompt in prompts]
    for prompt, state in zip(prompts, states, strict=True):
        if len(prompt) > 1:
            stage.run(StageStep(Frame.of_token_ids(prompt[:-1]), 0, 0), state)
    for _ in range(N_TOKENS):
        works: list[tuple[StageStep, CacheState]] = [
            (step(stage, text[-1:], len(text) - 1), state)
            for text, state in zip(texts, states, strict=True)
        ]
        for text, answer in zip(texts, stage.run_batch(works), strict=True):
            text.append(token(answer))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def token(answer: object) -> int:
    assert isinstance(answer, TailAnswer)
    assert answer.token_id is not None
    return answer.token_id


@pytest.mark.parametrize("family", LEAN_FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_llama_like_families_run_lean_and_say_the_same(
    tmp_path: Path, no_lean: Callable[[Path], TorchStage], family: str, *, tied: bool
) -> None:
    """Token for token in float32, whatever the prompt's chunks."""
    save_tiny(tmp_path, family, N_LAYERS, tied=tied)
    lean, plain = load(tmp_path), no_lean(tmp_path)
    assert isinstance(layers_of(lean), LeanLayers)
    assert isinstance(layers_of(plain), FamilyLayers)

    for prompt in PROMPTS:
        expected = alone(plain, prompt)
        assert alone(lean, prompt) == expected
        assert alone(lean, prompt, chunk=3) == expected


@pytest.mark.parametrize("family", [*LEAN_FAMILIES, "gemma2"])
def test_a_batch_gives_each_session_what_it_gets_alone(tmp_path: Path, family: str) -> None:
    """Sessions of 1 to 10 tokens in one batch: token for token in float32, lean or not."""
    save_tiny(tmp_path, family, N_LAYERS, tied=False)
    stage = load(tmp_path)
    assert max(map(len, PROMPTS)) + N_TOKENS > 2 * WINDOW

    assert together(stage, PROMPTS) == [alone(stage, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_packed_weights_do_not_see_their_batch(tmp_path: Path, packing: Packing) -> None:
    """With weights of 8 and 4 bits a row of hidden states is bit for bit the same in any batch."""
    wider: dict[str, Any] = {**COMMON, "intermediate_size": 64}
    save(tmp_path, LlamaConfig(**wider))
    stage = load(tmp_path, (0, 2), packing)
    assert isinstance(layers_of(stage), LeanLayers)
    solo = [hidden_of(stage, [prompt]) for prompt in PROMPTS]

    assert hidden_of(stage, PROMPTS) == b"".join(solo)


def hidden_of(stage: TorchStage, prompts: Sequence[list[int]]) -> bytes:
    """The hidden states after each prompt's last token, which all are fed in one batch."""
    states = [stage.new_state(0) for _ in prompts]
    for prompt, state in zip(prompts, states, strict=True):
        if len(prompt) > 1:
            stage.run(StageStep(Frame.of_token_ids(prompt[:-1]), 0, 0), state)
    works = [
        (step(stage, prompt[-1:], len(prompt) - 1), state)
        for prompt, state in zip(prompts, states, strict=True)
    ]
    frames = [cast("Frame", outcome) for outcome in stage.run_batch(works)]
    return b"".join(frame.data for frame in frames)


def save(folder: Path, config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": N_LAYERS,
    "max_position_embeddings": 128,
}
LOOKALIKES: dict[str, Callable[[], PreTrainedConfig]] = {
    "a factor of what layers add": lambda: GraniteConfig(**COMMON, residual_multiplier=0.22),
    "a factor of embeddings": lambda: GraniteConfig(**COMMON, embedding_multiplier=12.0),
    "a factor of logits": lambda: GraniteConfig(**COMMON, logits_scaling=8.0),
    "a rotation by the text's length": lambda: LlamaConfig(
        **COMMON,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lookalike", LOOKALIKES)
def test_a_family_that_looks_alike_and_is_not_runs_its_own_way(
    tmp_path: Path, lookalike: str, dtype: Dtype
) -> None:
    """The parts are Llama's, the numbers are not: the family's own forward is kept."""
    save(tmp_path, LOOKALIKES[lookalike]())

    assert isinstance(layers_of(load(tmp_path, dtype=dtype)), FamilyLayers)


@pytest.mark.parametrize("size", [1.0, 50.0, 5000.0])
@pytest.mark.parametrize("family", LEAN_FAMILIES)
def test_what_a_layer_adds_may_be_lost_in_the_digits_of_bfloat16(
    tmp_path: Path, family: str, size: float
) -> None:
    """Real models have hidden states that dwarf what a layer adds; they run lean all the same."""
    model = save_tiny(tmp_path, family, N_LAYERS, tied=False).model
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(size)
    model.save_pretrained(tmp_path)

    assert isinstance(layers_of(load(tmp_path, dtype="bfloat16")), LeanLayers)


def test_a_norm_is_taken_in_float32() -> None:
    """Squares in bfloat16 would have no digits left in their sum."""
    rows, weight = torch.randn(8, 4096).bfloat16(), torch.randn(4096).bfloat16()
    expected = torch.nn.functional.rms_norm(rows.float(), (4096,), weight.float(), 1e-5)

    torch.testing.assert_close(Norm(weight, 1e-5)(rows).float(), expected, rtol=2**-8, atol=0.0)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_chunks_of_a_windowed_text_give_the_same_hidden_states(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A text in chunks of any lengths, over windows that move on, matches the text in one step."""
    folder = tmp_path_factory.getbasetemp() / "mistral"
    if not folder.exists():
        save_tiny(folder, "mistral", N_LAYERS, tied=False)
    stage = load(folder, (0, 2))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    ids = [i * 7 % 64 for i in range(sum(lengths))]
    whole = rows_of(stage, ids, [len(ids)])

    assert torch.allclose(rows_of(stage, ids, lengths), whole, atol=1e-4)


def rows_of(stage: TorchStage, ids: list[int], lengths: Sequence[int]) -> torch.Tensor:
    """[n, hidden] of all tokens."""
    state, position = stage.new_state(0), 0
    parts: list[bytes] = []
    for length in lengths:
        some = Frame.of_token_ids(ids[position : position + length])
        frame = stage.run(StageStep(some, 0, position), state)
        parts.append(cast("Frame", frame).data)
        position += length
    flat = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float32)
    return flat.reshape(len(ids), -1)


def test_a_window_bounds_what_a_session_takes(tmp_path: Path) -> None:
    """A long text takes no more than a short one where all layers have windows."""
    save_tiny(tmp_path, "mistral", N_LAYERS, tied=False)
    stage = load(tmp_path)
    state = stage.new_state(0)
    sizes: list[int] = []
    for position in range(120):
        stage.run(step(stage, [position % 64], position), state)
        sizes.append(state.nbytes)

    assert max(sizes[64:]) == max(sizes[:64])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_state_takes_what_was_told_before(tmp_path: Path, family: str) -> None:
    """What was reckoned is at most a block too much, and within what the head counts with."""
    save_tiny(tmp_path, family, N_LAYERS, tied=False)
    stage = load(tmp_path, (1, 3))
    state, cost = stage.new_state(1), stage.state_cost
    hidden = Frame("float32", (1, 1, 32), bytes(torch.ones(32).numpy().tobytes()))
    for position in range(100):
        stage.run(StageStep(hidden, 1, position), state)
        n_tokens = position + 1
        reckoned = stage.state_nbytes(n_tokens)
        assert reckoned - BLOCK_TOKENS * cost.token_bytes <= state.nbytes <= reckoned
        assert reckoned <= cost.base_bytes + n_tokens * cost.token_bytes
