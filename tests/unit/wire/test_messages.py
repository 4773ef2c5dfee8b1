from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from meshnet.generation import TokenScore
from meshnet.model.fake_stage import fake_facts
from meshnet.topology import LayerSpan
from meshnet.wire.headers import PROTOCOL_VERSION
from meshnet.wire.messages import ShardInfo, ShardReadiness, TailAnswer
from tests.unit.fakes import shard_info


def test_a_description_gives_the_routes_facts() -> None:
    """A shard's description carries all that a route depends on, and the protocol's version."""
    facts = replace(
        fake_facts(LayerSpan(1, 3)),
        weights="commit-1",
        state_base_bytes=1,
        state_token_bytes=2,
        cache_bytes=3,
        max_sessions=4,
    )
    info = shard_info(facts)

    assert (facts, PROTOCOL_VERSION) == (info.facts(), info.protocol)


def test_a_description_comes_back() -> None:
    """A description read from its own JSON is the same."""
    info = shard_info(fake_facts(LayerSpan(1, 3)))

    assert info == ShardInfo.model_validate_json(info.model_dump_json())


def test_members_of_a_later_version_are_passed_over() -> None:
    """What this version does not know is no fault of a description."""
    info = shard_info(fake_facts(LayerSpan(1, 3)))

    assert info == ShardInfo.model_validate(info.model_dump() | {"gpu": "none"})


def test_a_description_of_an_older_shard_is_read() -> None:
    """What older shards do not tell has a default: not draining, weights and sizes unknown."""
    told = shard_info(fake_facts(LayerSpan(1, 3))).model_dump()
    newer = ("draining", "transformers_version", "weights", "layer_digests")
    newer += ("state_base_bytes", "state_token_bytes")
    info = ShardInfo.model_validate({k: v for k, v in told.items() if k not in newer})

    assert (info.draining, info.transformers_version) == (False, "")
    assert (info.weights, info.layer_digests) == (None, ())
    assert (info.state_base_bytes, info.state_token_bytes) == (0, 0)


@pytest.mark.parametrize(
    "lie",
    [
        {"start_layer": 3, "end_layer": 3},
        {"start_layer": -1},
        {"end_layer": 5},
        {"dtype": "object"},
        {"fingerprint": "two words"},
        {"hidden_size": 0},
        {"state_base_bytes": -1},
        {"state_token_bytes": -1},
        {"boot_id": ""},
        {"layer_digests": ["one"]},
        {"layer_digests": ["one", "two", "three"]},
    ],
    ids=str,
)
def test_an_impossible_description_is_refused(lie: dict[str, object]) -> None:
    """Spans outside the model, unknown dtypes, digests of other layers, and what cannot travel."""
    info = shard_info(fake_facts(LayerSpan(1, 3)))
    with pytest.raises(ValidationError):
        ShardInfo.model_validate(info.model_dump() | lie)


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_a_token_id_fits_the_wire(token_id: int) -> None:
    """A tail's id that could not be sent as int32 is refused when it is read."""
    with pytest.raises(ValidationError):
        TailAnswer(token_id=token_id)


def test_a_tails_answer_may_be_empty() -> None:
    """After a chunk that samples nothing there is neither a token nor text."""
    answer = TailAnswer.model_validate_json("{}")

    assert (answer.token_id, answer.text) == (None, None)
    assert (answer.score, answer.prompt_scores) == (None, ())


def test_scores_come_back_to_the_last_bit() -> None:
    """Who compares a token's number with its alternatives' finds them as they were."""
    logprob = -1.1000000238418579
    score = TokenScore(token_id=7, logprob=logprob, top=((7, logprob), (8, -9999.0)))
    answer = TailAnswer(token_id=7, score=score, prompt_scores=(score, score))

    assert answer == TailAnswer.model_validate_json(answer.model_dump_json())


@pytest.mark.parametrize("logprob", ["NaN", "-Infinity", "-1e999", "null"])
@pytest.mark.parametrize(
    "text",
    [
        '{"score": {"token_id": 1, "logprob": %s}}',
        '{"prompt_scores": [{"token_id": 1, "logprob": 0, "top": [[1, %s]]}]}',
    ],
)
def test_a_score_is_a_number(text: str, logprob: str) -> None:
    """What no JSON can say is refused, though Python's reader would take it."""
    with pytest.raises(ValidationError):
        TailAnswer.model_validate_json(text % logprob)


def test_an_unknown_state_is_refused() -> None:
    """A shard is loading, ready, draining or failed."""
    with pytest.raises(ValidationError):
        ShardReadiness.model_validate({"state": "asleep"})
