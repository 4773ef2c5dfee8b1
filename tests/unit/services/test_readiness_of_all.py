from __future__ import annotations

import pytest

from meshnet.head.readiness import HeadState, ReadyState
from services.head.head import overall

READY = ReadyState("ready", serves=True)
MISSING = ReadyState("degraded", serves=True, reason="no standby")
BROKEN = ReadyState("degraded", reason="a shard is gone")
LOADING = ReadyState("loading", reason="10 of 100 bytes")
PROBING = ReadyState("probing", reason="no token yet")
DRAINING = ReadyState("draining", reason="finishing")


@pytest.mark.parametrize("state", [READY, MISSING, BROKEN, LOADING, PROBING, DRAINING])
def test_the_only_models_state_is_the_heads(state: ReadyState) -> None:
    """With one model its own reason is told, without its name."""
    assert overall({"a": state}) == state


def test_a_head_is_ready_if_every_model_is() -> None:
    """Then there is no reason to give."""
    assert overall({"a": READY, "b": READY}) == READY


@pytest.mark.parametrize("other", [MISSING, BROKEN, LOADING, PROBING])
def test_one_model_that_serves_is_enough(other: ReadyState) -> None:
    """Then the head serves, degraded, and each other model's reason is told with its name."""
    expected = ReadyState("degraded", serves=True, reason=f"b: {other.reason}")

    assert expected == overall({"a": READY, "b": other})


def test_every_reason_is_told() -> None:
    """One reason a model, in their order."""
    assert overall({"a": MISSING, "b": LOADING}).reason == "a: no standby; b: 10 of 100 bytes"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((LOADING, LOADING), "loading"),
        ((PROBING, LOADING), "loading"),
        ((PROBING, PROBING), "probing"),
        ((LOADING, BROKEN), "degraded"),
        ((DRAINING, DRAINING), "draining"),
    ],
)
def test_no_model_that_serves_is_not_ready(
    states: tuple[ReadyState, ReadyState], expected: HeadState
) -> None:
    """Then the state is that of the model in the worse way."""
    found = overall(dict(zip("ab", states, strict=True)))

    assert (found.state, found.serves) == (expected, False)
    assert found.reason == f"a: {states[0].reason}; b: {states[1].reason}"
