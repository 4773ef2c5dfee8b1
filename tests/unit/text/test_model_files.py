from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from meshnet.errors import ModelError
from meshnet.text import model_files
from meshnet.text.model_files import SMALL_FILES, ModelFacts, find_folder, read_facts
from tests.unit.text.making import save_model


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """A local folder is used in place; nothing is fetched."""
    assert tmp_path == find_folder(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "three/part/name", "a b"])
def test_what_is_neither_folder_nor_id_is_named(model: str) -> None:
    """A missing folder that cannot be a Hugging Face id is refused, saying what is allowed."""
    with pytest.raises(ModelError, match=r"no folder .*allowed: a folder with config\.json"):
        find_folder(model)


def test_a_hugging_face_id_fetches_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a Hugging Face id the snapshot's folder is used, and only small files are asked for."""
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(model_files, "snapshot_download", snapshot_download)

    assert tmp_path == find_folder("owner/model-1.0")
    assert [("owner/model-1.0", list(SMALL_FILES))] == asked


@pytest.mark.parametrize("error", [OSError("no such repository"), ValueError("bad id")])
def test_a_failed_fetch_says_what_the_hub_said(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository that cannot be had is a ModelError with the hub's own words."""

    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(model_files, "snapshot_download", snapshot_download)

    with pytest.raises(ModelError, match=f"owner/model is no folder.*{error}"):
        find_folder("owner/model")


@pytest.mark.parametrize(
    "weight", ["model.safetensors", "pytorch_model.bin", "model-00001-of-2.safetensors", "m.gguf"]
)
def test_no_pattern_matches_weights(weight: str) -> None:
    """No weight file matches what is fetched of a repository."""
    assert not any(fnmatch(weight, pattern) for pattern in SMALL_FILES)


def test_end_tokens_are_joined_from_all_configs(tmp_path: Path) -> None:
    """The end tokens of config, nested text config and generation config are one set."""
    config: dict[str, object] = {"eos_token_id": 2, "text_config": {"eos_token_id": [5, 6]}}
    save_model(tmp_path, config=config, generation_config={"eos_token_id": [6, 7]})

    assert frozenset({2, 5, 6, 7}) == read_facts(tmp_path).end_token_ids


@pytest.mark.parametrize(
    ("config", "n_layers", "max_positions"),
    [
        ({"num_hidden_layers": 30, "max_position_embeddings": 2048}, 30, 2048),
        ({"n_layer": 12, "n_positions": 1024}, 12, 1024),
        ({"text_config": {"num_hidden_layers": 4, "max_position_embeddings": 64}}, 4, 64),
        ({"num_hidden_layers": "many", "text_config": None}, None, None),
    ],
)
def test_layers_and_context_are_read_where_they_are(
    tmp_path: Path, config: dict[str, object], n_layers: int | None, max_positions: int | None
) -> None:
    """Layer count and context are found under their usual names, nested too, else None."""
    save_model(tmp_path, config=config)

    assert ModelFacts(frozenset(), n_layers, max_positions) == read_facts(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    """A folder without config.json is refused by that name."""
    with pytest.raises(ModelError, match=r"config\.json cannot be read: No such file.*allowed"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "is not JSON"), ("[]", "is no JSON object"), ("\xff", "not JSON")]
)
def test_a_broken_config_is_named(tmp_path: Path, text: str, problem: str) -> None:
    """A generation_config.json that is no JSON object is refused by name, not passed over."""
    save_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(text, encoding="latin-1")

    with pytest.raises(ModelError, match=rf"generation_config\.json {problem}|{problem}"):
        read_facts(tmp_path)
