"""What clients ask the model for when its answer must be known: a schema leaves it no choice."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Fruit(BaseModel):
    """A fruit; all of it is forced but the size."""

    name: Literal["plum"]
    count: Literal[3]
    size: Literal["small", "large"]


class Place(BaseModel):
    """The argument of `get_weather`."""

    city: Literal["Paris"]


WEATHER = "It rains in Paris."

ASK_FRUIT = "Describe a fruit."
ASK_WEATHER = "What is the weather like?"

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
