"""instructor, which needs an older openai than the newest and so an environment of its own.

`python instructor_client.py SCENARIO` prints what came of it, as JSON. The environment tells where:
BASE_URL and MODEL.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal

import instructor
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel

BASE_URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]  # noqa: TID251  # a script
MESSAGES = [{"role": "user", "content": "Describe a fruit."}]


class Fruit(BaseModel):
    """See answers.py; nothing of this folder can be imported here."""

    name: Literal["plum"]
    count: Literal[3]
    size: Literal["small", "large"]


def _client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(
        OpenAI(base_url=BASE_URL, api_key="any", max_retries=0), mode=mode
    )


def _create(mode: instructor.Mode) -> dict[str, object]:
    fruit = _client(mode).create(
        model=MODEL, messages=MESSAGES, response_model=Fruit, max_retries=0, temperature=0
    )
    return fruit.model_dump()


def tools() -> object:
    """By a named tool call."""
    return _create(instructor.Mode.TOOLS)


def json_schema() -> object:
    """By a response format."""
    return _create(instructor.Mode.JSON_SCHEMA)


def partial() -> object:
    """Streamed; the last state."""
    states = _client(instructor.Mode.TOOLS).create_partial(
        model=MODEL, messages=MESSAGES, response_model=Fruit, max_retries=0, temperature=0
    )
    return list(states)[-1].model_dump()


def broken() -> object:
    """The name of the error."""
    try:
        _create(instructor.Mode.JSON_SCHEMA)
    except InstructorRetryException as error:
        return str(error)
    return None


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))  # noqa: T201  # the test reads it
