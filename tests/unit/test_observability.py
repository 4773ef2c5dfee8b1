from __future__ import annotations

import json
import logging
from collections.abc import Generator

import pytest
import structlog

from meshnet.observability import configure_logging

TOUCHED = ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Generator[None]:
    """Logging is a process's, so give it back as found."""
    root = logging.getLogger()
    found = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in TOUCHED}
    yield
    root.handlers[:], root.level = found
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    structlog.reset_defaults()


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_structlogs_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    """With the format json a line is one object: event, level, logger, time and members."""
    configure_logging("json")
    structlog.get_logger("meshnet.x").info("step", n_tokens=3)
    (line,) = lines_of(capsys)

    assert line.pop("timestamp")
    assert line == {"event": "step", "level": "info", "logger": "meshnet.x", "n_tokens": 3}


def test_the_standard_librarys_lines_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign library's record goes through the same renderer."""
    configure_logging("json")
    logging.getLogger("foreign").warning("%s is late", "x")
    (line,) = lines_of(capsys)

    assert (line["event"], line["level"]) == ("x is late", "warning")


def test_an_exception_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A line logged with an exception carries its traceback."""
    configure_logging("json")
    structlog.get_logger("meshnet.x").error("failed", exc_info=OSError("disk gone"))
    (line,) = lines_of(capsys)

    assert "disk gone" in str(line["exception"])


def test_the_console_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """By default a line is for a person, without colour codes."""
    configure_logging()
    structlog.get_logger("meshnet.x").info("step", n_tokens=3)
    text = capsys.readouterr().err

    assert "n_tokens=3" in text
    assert "\x1b" not in text


def test_setting_up_twice_logs_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The second set-up replaces the first, and leaves handlers that are not ours."""
    foreign = logging.NullHandler()
    logging.getLogger().addHandler(foreign)
    configure_logging("json")
    configure_logging("json")
    structlog.get_logger("meshnet.x").info("step")

    assert len(lines_of(capsys)) == 1
    assert foreign in logging.getLogger().handlers


def test_uvicorns_lines_go_our_way(capsys: pytest.CaptureFixture[str]) -> None:
    """Uvicorn's own handlers are taken off, so that its lines are rendered like all others."""
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler())
    configure_logging("json")
    logging.getLogger("uvicorn.error").info("started")

    assert [line["event"] for line in lines_of(capsys)] == ["started"]


@pytest.mark.parametrize("name", ["httpx", "httpcore", "uvicorn.access"])
def test_a_request_gets_no_line_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What libraries would log for each request, that is for each token, is left out."""
    configure_logging("json")
    logging.getLogger(name).info("POST /v1/forward")

    assert lines_of(capsys) == []


def test_the_level_is_a_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    """What is less than the level is not written."""
    configure_logging("json", logging.WARNING)
    structlog.get_logger("meshnet.x").info("step")

    assert lines_of(capsys) == []
