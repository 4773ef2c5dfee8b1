"""A shard loads its span and nothing else, or refuses and says why."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# transformers and gguf type their surface loosely.

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Gemma4TextConfig,
    GraniteConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from meshnet.errors import Draining, InvalidRequest, ModelError
from meshnet.model.loading import StagePlan, plan_stage
from meshnet.model.weights.packing import Packing
from meshnet.topology import LayerSpan
from tests.support.hub import COMMIT, FakeHub
from tests.support.serving import serve
from tests.support.tiny import config_of, save_tiny

pytestmark = pytest.mark.mesh

N_LAYERS = 4


def _plan(model: Path | str, start: int = 0, end: int = N_LAYERS) -> StagePlan:
    return plan_stage(str(model), LayerSpan(start, end), "float32", n_threads=1)


def _tensors(plan: StagePlan) -> dict[str, torch.Tensor]:
    plan.read()
    return dict(plan.piece.model.state_dict())


@pytest.mark.parametrize(
    ("span", "has_embedding", "has_head"),
    [((0, 2), True, False), ((1, 3), False, False), ((2, 4), False, True), ((0, 4), True, True)],
)
def test_a_span_holds_its_own_tensors_only(
    tmp_path: Path, span: tuple[int, int], *, has_embedding: bool, has_head: bool
) -> None:
    """The first span has the embedding, the last one norm and lm_head, and each only its layers."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    names = set(_tensors(_plan(tmp_path, *span)))
    layers = {int(name.split(".")[2]) for name in names if ".layers." in name}
    assert layers == set(range(span[1] - span[0]))
    assert ("model.embed_tokens.weight" in names) == has_embedding
    assert ("lm_head.weight" in names) == has_head
    assert ("model.norm.weight" in names) == has_head


def test_tied_embeddings_are_counted_and_held_once(tmp_path: Path) -> None:
    """A shard that holds the whole tied model has one tensor for embedding and lm_head."""
    tiny = save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    plan = _plan(tmp_path)
    tensors = _tensors(plan)
    head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    assert head.data_ptr() == embedding.data_ptr()
    assert plan.nbytes == sum(p.nbytes for p in tiny.model.parameters())


def test_only_files_with_tensors_of_the_span_are_needed(tmp_path: Path) -> None:
    """A sharded checkpoint without total_size loads, even without the files of other spans."""
    tiny = save_tiny(tmp_path, "llama", N_LAYERS, tied=False)
    (tmp_path / "model.safetensors").unlink()
    tiny.model.save_pretrained(tmp_path, max_shard_size="20KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    del index["metadata"]
    index_path.write_text(json.dumps(index))
    own = {f for name, f in index["weight_map"].items() if ".layers.1." in name}
    for file in set(index["weight_map"].values()) - own:
        (tmp_path / file).unlink()
    tensors = _tensors(_plan(tmp_path, 1, 2))
    expected = tiny.model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], expected)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """A safetensors file that lacks its last bytes is refused before a weight is read."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match="damaged"):
        _plan(tmp_path)


def test_an_untied_model_without_lm_head_is_refused(tmp_path: Path) -> None:
    """The tail of an untied model whose checkpoint lacks lm_head is refused, naming the tensor."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"missing.*lm_head\.weight"):
        _plan(tmp_path, 2, 4)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    """A config that counts other sizes than the checkpoint holds is refused, naming a tensor."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ModelError, match=r"of another shape.*mlp"):
        _plan(tmp_path, 2, 4).load()


@pytest.mark.parametrize("span", [(0, 5), (4, 5), (3, 9)])
def test_layers_beyond_the_model_are_refused(tmp_path: Path, span: tuple[int, int]) -> None:
    """A span that leaves the model is refused with the number of layers there are."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    with pytest.raises(ModelError, match="which has 4") as caught:
        _plan(tmp_path, *span)
    assert caught.value.members["field"] == "layers"


@pytest.mark.parametrize("text", ["", "4", "4-", "a-b", "3-3", "5-2", "-1-3"])
def test_a_malformed_span_is_refused(text: str) -> None:
    """Layers that are no range are refused, naming the field and what is allowed."""
    with pytest.raises(InvalidRequest) as caught:
        LayerSpan.parse(text)
    assert {"field", "value", "allowed"} <= caught.value.members.keys()


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    """T5 is no decoder-only model, and the refusal says so."""
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no causal language model|cannot be split"):
        _plan(tmp_path, 0, 1)


def test_a_model_without_a_list_of_layers_is_refused(tmp_path: Path) -> None:
    """BERT keeps its layers elsewhere, and the refusal says what can be split."""
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be split"):
        _plan(tmp_path, 0, 1)


def test_a_cut_between_layers_that_share_state_is_refused(tmp_path: Path) -> None:
    """Gemma 4 layers lend each other keys and values: such a cut is refused, not run wrong."""
    config = Gemma4TextConfig(
        vocab_size=64,
        hidden_size=32,
        hidden_size_per_layer_input=0,
        intermediate_size=48,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ModelError, match="shares state between layers"):
        _plan(tmp_path, 0, 2)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing"])
def test_a_missing_model_is_refused(model: str) -> None:
    """A path that is not there is refused, saying what a model may be."""
    with pytest.raises(ModelError, match="no such file or folder") as caught:
        _plan(model)
    assert "GGUF" in str(caught.value.members["allowed"])


async def test_a_hugging_face_id_fetches_the_files_of_the_span_only(tmp_path: Path) -> None:
    """From a hub only config, index and the files that hold the span's tensors are fetched."""
    repository = tmp_path / "repository"
    tiny = save_tiny(repository, "qwen3", N_LAYERS, tied=False)
    (repository / "model.safetensors").unlink()
    tiny.model.save_pretrained(repository, max_shard_size="20KB")
    index = json.loads((repository / "model.safetensors.index.json").read_text())
    own = {file for name, file in index["weight_map"].items() if ".layers.1." in name}
    hub = FakeHub(repository)
    async with serve(hub.app) as served:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from meshnet.model.loading import plan_stage\n"
            "from meshnet.topology import LayerSpan\n"
            "facts = plan_stage('owner/name', LayerSpan(1, 2), 'float32').load().facts\n"
            "print(facts.weights, *facts.layer_digests)",
            env={"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "hf"), "PATH": "/usr/bin"},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await child.communicate()
    local = _plan(repository, 1, 2).load().facts.layer_digests
    assert output.decode().split() == [f"commit-{COMMIT}", *local]
    assert {name for name in hub.fetched if name.endswith(".safetensors")} == own


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_gguf_tensors_are_those_of_transformers_own_loader(tmp_path: Path, family: str) -> None:
    """Spans of a GGUF file, quantised, hold bit for bit what transformers makes of the whole."""
    path = _write_gguf(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    for start, end in [(0, 2), (2, 4)]:
        for name, tensor in _tensors(_plan(path, start, end)).items():
            parts = name.split(".")
            if ".layers." in name:
                parts[2] = str(int(parts[2]) + start)
            assert torch.equal(tensor, reference[".".join(parts)]), name


@pytest.mark.parametrize("packing", [None, "int8", "int4"])
def test_layers_of_a_gguf_are_packed_alike_in_any_span(
    tmp_path: Path, packing: Packing | None
) -> None:
    """Parts of a GGUF, a tied lm_head among them, hold what the whole holds."""
    path = _write_gguf(tmp_path, "llama")

    def digests(start: int, end: int) -> tuple[str, ...]:
        plan = plan_stage(str(path), LayerSpan(start, end), "float32", packing=packing, n_threads=1)
        return plan.load().facts.layer_digests

    assert digests(0, 2) + digests(2, N_LAYERS) == digests(0, N_LAYERS)


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    """A GGUF file that lacks its last bytes is refused before a weight is read."""
    path = _write_gguf(tmp_path, "llama")
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match="cannot be read"):
        _plan(path, 0, 2)


def test_the_weights_of_a_gguf_are_a_digest_of_its_own_kind(tmp_path: Path) -> None:
    """Every span of a GGUF file has one digest of it, and a file with other blocks another one."""
    path = _write_gguf(tmp_path, "llama")
    first, second = (_plan(path, *span).facts.weights for span in [(0, 2), (2, 4)])
    assert first == second
    assert str(first).startswith("gguf-")
    path.write_bytes(path.read_bytes()[:-16] + bytes(16))
    assert _plan(path, 0, 2).facts.weights != first


@pytest.mark.parametrize(
    "text",
    ["no JSON", "[]", '{"model_type": "none"}', '{"model_type": "llama", "hidden_size": "wide"}'],
)
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    """A config.json that is none is refused by name, beside safetensors and beside a GGUF file."""
    if kind == "gguf":
        _write_gguf(tmp_path, "llama")
    else:
        save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        _plan(tmp_path, 0, 2)


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_loading_stops_when_its_listener_raises(tmp_path: Path, kind: str) -> None:
    """What the listener raises comes out of `load`, and it is not called again."""
    if kind == "gguf":
        _write_gguf(tmp_path, "llama")
    else:
        save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    stop = Draining("stop")
    heard: list[int] = []

    def listen(n_bytes: int) -> None:
        heard.append(n_bytes)
        if len(heard) == 3:
            raise stop

    with pytest.raises(Draining) as caught:
        _plan(tmp_path).load(listen)
    assert caught.value is stop
    assert len(heard) == 3


def test_loading_stops_between_the_layers_it_hashes(tmp_path: Path) -> None:
    """Where tensors are mapped, hashing is what reads them: it can be stopped too."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    plan = _plan(tmp_path)
    heard: list[int] = []

    def listen(n_bytes: int) -> None:
        heard.append(n_bytes)
        if heard.count(plan.nbytes) == 3:  # once for the last tensor, then before each layer
            raise Draining("stop")

    with pytest.raises(Draining):
        plan.load(listen)
    assert heard == sorted(heard)
    assert heard[-3:] == [plan.nbytes] * 3


def _write_gguf(folder: Path, family: str) -> Path:
    """A random GGUF of the family's shape: matrices in Q8_0 and Q4_1, norms in float32."""
    config: Any = config_of(family, N_LAYERS, tied=True)
    path = folder / f"{family}.gguf"
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(64)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_key_length(_head_dim(family))
    writer.add_value_length(_head_dim(family))
    writer.add_sliding_window(8)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(64)])
    rng = np.random.default_rng(0)
    for name, shape in _gguf_shapes(family).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        is_8_bit = "ffn" in name or "embd" in name
        kind = gguf.GGMLQuantizationType.Q8_0 if is_8_bit else gguf.GGMLQuantizationType.Q4_1
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_dim(family: str) -> int:
    return 128 if family == "qwen3" else 8  # transformers reads no other from a Qwen 3 GGUF


def _gguf_shapes(family: str) -> dict[str, tuple[int, ...]]:
    hidden, ffn = 32, 64
    q, kv = 4 * _head_dim(family), 2 * _head_dim(family)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (64, hidden),
        "output_norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    if family in {"qwen3", "gemma3"}:
        layer |= {"attn_q_norm": (_head_dim(family),), "attn_k_norm": (_head_dim(family),)}
    if family == "gemma3":
        layer |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
    for index in range(N_LAYERS):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def test_a_family_that_changes_what_a_later_span_is_given_is_refused(tmp_path: Path) -> None:
    """Granite scales embeddings in front of every stage's layers: only its first span may run."""
    config = GraniteConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        embedding_multiplier=12.0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plan_stage(str(tmp_path), LayerSpan(0, 2), "float32").load()
    with pytest.raises(ModelError, match="changes hidden states before its first layer"):
        plan_stage(str(tmp_path), LayerSpan(2, 4), "float32").load()
