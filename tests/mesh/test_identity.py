"""A shard's identity says what it runs: two models are told apart, one model is known again."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers and safetensors type their surface loosely.

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from meshnet.errors import RouteError
from meshnet.model import checkpoint
from meshnet.model.checkpoint import HubFiles
from meshnet.model.loading import plan_stage
from meshnet.topology import Hop, LayerSpan, ShardFacts, check_same_model
from meshnet.wire.frames import Dtype
from tests.support.tiny import save_tiny

pytestmark = pytest.mark.mesh

N_LAYERS = 4


def _facts(
    model: Path, start: int = 0, end: int = N_LAYERS, dtype: Dtype = "float32"
) -> ShardFacts:
    """What a shard says of itself once it is loaded."""
    return plan_stage(str(model), LayerSpan(start, end), dtype, n_threads=1).load().facts


def _planned(model: Path, start: int = 0, end: int = N_LAYERS) -> ShardFacts:
    return plan_stage(str(model), LayerSpan(start, end), "float32", n_threads=1).facts


def _hop(facts: ShardFacts) -> Hop:
    return Hop(f"http://shard-{facts.span}", facts.span, facts)


def _reshard(folder: Path) -> dict[str, str]:
    """Spread a folder's tensors over many files; the index's map."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_a_layer_has_one_digest_whatever_span_it_is_in(
    tmp_path: Path, family: str, *, tied: bool
) -> None:
    """Parts of a model give, layer by layer, the digests of the whole, and no two are equal."""
    save_tiny(tmp_path, family, N_LAYERS, tied=tied)
    whole = _facts(tmp_path).layer_digests
    assert len(set(whole)) == N_LAYERS
    for start, end in [(0, 2), (2, 4), (1, 3), (0, 1), (3, 4)]:
        assert _facts(tmp_path, start, end).layer_digests == whole[start:end]


def test_merged_experts_have_one_digest_whatever_span_they_are_in(tmp_path: Path) -> None:
    """Layers whose tensors the loader makes of several have the same digests in parts and whole."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    whole = _facts(tmp_path).layer_digests
    assert _facts(tmp_path, 0, 1).layer_digests + _facts(tmp_path, 1, 4).layer_digests == whole


@pytest.mark.parametrize(
    ("tensor", "tied", "changed"),
    [
        ("model.layers.2.mlp.up_proj.weight", True, {2}),
        ("model.layers.0.input_layernorm.weight", False, {0}),
        ("model.embed_tokens.weight", False, {0}),
        ("model.embed_tokens.weight", True, {0, N_LAYERS - 1}),
        ("model.norm.weight", False, {N_LAYERS - 1}),
        ("lm_head.weight", False, {N_LAYERS - 1}),
    ],
)
def test_one_changed_number_changes_its_layers_digest_only(
    tmp_path: Path, tensor: str, *, tied: bool, changed: set[int]
) -> None:
    """A perturbed weight changes the digests of the layers it belongs to, and the fingerprint."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=tied)
    before = _facts(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    tensors[tensor].view(-1)[40 % tensors[tensor].numel()] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    after = _facts(tmp_path)
    pairs = zip(before.layer_digests, after.layer_digests, strict=True)
    assert {layer for layer, (a, b) in enumerate(pairs) if a != b} == changed
    assert after.fingerprint != before.fingerprint
    assert after.revision == before.revision


def test_one_folder_loaded_twice_is_the_same_model(tmp_path: Path) -> None:
    """Nothing of the identity depends on the process or the time: all facts come out equal."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    assert _facts(tmp_path, 1, 4) == _facts(tmp_path, 1, 4)


def test_the_transformers_version_is_told(tmp_path: Path) -> None:
    """A shard says which transformers runs its layers."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    assert _planned(tmp_path).transformers_version == transformers.__version__


def test_another_dtype_is_another_fingerprint(tmp_path: Path) -> None:
    """The same span in bfloat16 has another fingerprint and other digests than in float32."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    wide, narrow = _facts(tmp_path), _facts(tmp_path, dtype="bfloat16")
    assert wide.fingerprint != narrow.fingerprint
    assert not set(wide.layer_digests) & set(narrow.layer_digests)
    assert wide.weights == narrow.weights


def test_two_finetunes_with_disjoint_spans_are_told_apart(tmp_path: Path) -> None:
    """Same config, same tensor names, no layer in common: refused by `weights`, both named."""
    save_tiny(tmp_path / "a", "llama", N_LAYERS, tied=True, seed=0)
    save_tiny(tmp_path / "b", "llama", N_LAYERS, tied=True, seed=1)
    ours, theirs = _facts(tmp_path / "a", 0, 2), _facts(tmp_path / "b", 2, 4)
    assert ours.revision == theirs.revision
    with pytest.raises(RouteError) as caught:
        check_same_model(_hop(ours), _hop(theirs))
    assert caught.value.members["field"] == "weights"
    assert {caught.value.members["value"], caught.value.members["allowed"]} == {
        ours.weights,
        theirs.weights,
    }


def test_shards_of_one_model_are_taken_together(tmp_path: Path) -> None:
    """Disjoint and overlapping spans of one folder pass the check of one model."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    first = _hop(_facts(tmp_path, 0, 2))
    for start, end in [(2, 4), (1, 4), (0, 4)]:
        check_same_model(first, _hop(_facts(tmp_path, start, end)))


def test_the_same_tensors_in_other_files_are_the_same_weights(tmp_path: Path) -> None:
    """How tensors are spread over files is no part of the identity."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    one_file = _facts(tmp_path)
    assert len(set(_reshard(tmp_path).values())) > 1
    assert _facts(tmp_path) == one_file


def test_a_folder_that_lacks_a_file_does_not_say_which_weights_it_is(tmp_path: Path) -> None:
    """Where a file of another span is missing, `weights` is None; layers still have digests."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    whole = _facts(tmp_path)
    files = _reshard(tmp_path)
    (tmp_path / files["model.layers.3.mlp.up_proj.weight"]).unlink()
    part = _facts(tmp_path, 1, 2)
    assert part.weights is None
    assert part.layer_digests == whole.layer_digests[1:2]


@pytest.mark.parametrize("left", [0, 4, 200, -64])
def test_a_folder_with_half_a_file_does_not_say_which_weights_it_is(
    tmp_path: Path, left: int
) -> None:
    """A file of another span that ends anywhere too early counts as missing."""
    save_tiny(tmp_path, "llama", N_LAYERS, tied=True)
    path = tmp_path / _reshard(tmp_path)["model.layers.3.mlp.up_proj.weight"]
    path.write_bytes(path.read_bytes()[:left])
    assert _planned(tmp_path, 1, 2).weights is None


def test_files_of_a_hub_are_all_of_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file's snapshot is the model's commit, and later files are asked of it."""
    asked: list[str | None] = []

    def download(repository: str, name: str, revision: str | None) -> str:
        asked.append(revision)
        return str(tmp_path / "snapshots" / repository / "snapshots" / "abc123" / name)

    monkeypatch.setattr(checkpoint, "hf_hub_download", download)
    files = HubFiles("owner/name")
    for name in ("config.json", "weights/model.safetensors"):
        files.fetch(name)
    assert asked == [None, "abc123"]
    assert files.weights([]) == "commit-abc123"
