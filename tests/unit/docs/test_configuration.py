"""docs/configuration.md names every setting there is, and no other."""

from __future__ import annotations

import json
import pkgutil
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

import services

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
NAME = re.compile(r"\bMESHNET_\w*[A-Z0-9]\b")
ROW = re.compile(r"^\| `(?P<name>MESHNET_\w+)` \|[^|]*\| (?P<default>[^|]+?) \|", re.MULTILINE)


def _settings() -> dict[str, FieldInfo]:
    """Every field of every settings class in services/*/settings.py, by its variable."""
    fields: dict[str, FieldInfo] = {}
    for package in pkgutil.iter_modules(services.__path__, "services."):
        if not package.ispkg or find_spec(f"{package.name}.settings") is None:
            continue
        for kind in vars(import_module(f"{package.name}.settings")).values():
            if isinstance(kind, type) and issubclass(kind, BaseSettings):
                prefix = kind.model_config.get("env_prefix", "")
                fields |= {f"{prefix}{k}".upper(): v for k, v in kind.model_fields.items()}
    return fields


def _as_written(field: FieldInfo) -> str:
    """A default as somebody would set it."""
    if field.is_required():
        return "required"
    default: object = field.get_default(call_default_factory=True, validated_data={})
    match default:
        case None:
            return "none"
        case bool(switch):
            return str(switch).lower()
        case float(number):
            return f"{number:g}"
        case tuple():
            return json.dumps(default)
        case Path() as path:
            return f"~/{path.relative_to(Path.home())}"
        case other:
            return str(other)


def test_page_names_every_setting_and_no_other() -> None:
    """A setting that is added, renamed or dropped is so on the page."""
    assert set(_settings()) == set(NAME.findall(PAGE.read_text()))


def test_page_gives_every_settings_default_in_its_own_row() -> None:
    """Each setting has one row, and its default there is the one in the code."""
    rows = [(row["name"], row["default"]) for row in ROW.finditer(PAGE.read_text())]
    expected = {name: _as_written(field) for name, field in _settings().items()}
    assert sorted(expected.items()) == sorted(rows)
