"""What a generation tells the tail, and where its text ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from meshnet.errors import HopProtocolError, InvalidRequest
from meshnet.generation import (
    NO_CONTEXT,
    Constraint,
    GenerationRequest,
    Grammar,
    Sampling,
    SamplingContext,
    Stopping,
    TokenEvent,
    TokenScore,
)
from meshnet.wire.messages import TailAnswer
from tests.unit.head.telling import END, SAMPLING, Answer, Head

# --- where an answer ends ---


@pytest.mark.parametrize(
    ("answers", "strings", "told"),
    [
        ([1, 2, 3, 4], ["2><3"], "<1>|<| stop"),
        ([1, 2, 3, 4], ["2><9"], "<1>|<|2><3>|<4> length"),
        ([1, 2, 3], ["3>x"], "<1>|<2>|<3> length"),
        ([1, 2, 3], ["3>"], "<1>|<2>|< stop"),
        ([1, END], ["1>x"], "<|1> stop"),
        ([50, END], ["~"], "| stop"),
        ([1, 50], ["~"], "<1>| stop"),
        (["<1>", "<2>", "<3>"], ["2"], "<1>|< stop"),
        (["<1>", "<2>"], ["2>x"], "<1>|<2> length"),
        (["<1>", ""], ["1>x"], "<|1> stop"),
    ],
)
async def test_a_stop_string_ends_the_text_before_it(
    head: Head, answers: list[Answer], strings: list[str], told: str
) -> None:
    """It may begin and end within tokens; what only looked like one is told, at the latest last."""
    assert told == await head.texts(answers, Stopping(tuple(strings)))


async def test_a_stop_string_may_stay_in_the_text(head: Head) -> None:
    """If it is to be kept, the text ends behind it, and nothing waits for it."""
    stopping = Stopping(("2><3",), keep_string=True)

    assert await head.texts([1, 2, 3, 4], stopping) == "<1>|<2>|<3 stop"


async def test_no_step_follows_a_stop_string(head: Head) -> None:
    """The token that completes it is the last one, and the session is freed."""
    pipeline = head.pipeline([1, 2, 3])
    events = await head.all(pipeline, stopping=Stopping(("2",)))

    assert events == [TokenEvent("<1>", 1), TokenEvent("<", 2, "stop")]
    assert (len(pipeline.asked), pipeline.closed) == (2, 1)


async def test_other_tokens_can_be_ends(head: Head) -> None:
    """A token that the request names ends the answer as an end token does, without its text."""
    events = await head.all(head.pipeline([1, 2]), stopping=Stopping(token_ids=frozenset({2})))

    assert events == [TokenEvent("<1>", 1), TokenEvent("", 2, "stop")]


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_an_ignored_end_is_a_token_as_others_are(head: Head, kv_cache: bool) -> None:
    """It is fed back, counts, and as a control token it has no text."""
    pipeline = head.pipeline([END, 2], kv_cache=kv_cache)
    events = await head.all(pipeline, max_tokens=2, stopping=Stopping(ignore_end=True))

    assert events == [TokenEvent("", END), TokenEvent("<2>", 2, "length")]
    assert pipeline.asked[1].ids[-1] == END


async def test_control_tokens_are_written_if_asked_for(head: Head) -> None:
    """The detokenizer leaves them in, and so does the answer."""
    stopping = Stopping(ignore_end=True)

    assert await head.texts([END, 2], stopping, skip_special_tokens=False) == "<99>|<2> length"


async def test_an_end_that_the_request_names_is_not_ignored(head: Head) -> None:
    """Only the model's own ends are."""
    stopping = Stopping(token_ids=frozenset({END}), ignore_end=True)

    assert await head.texts([1, END, 2], stopping) == "<1>| stop"


@pytest.mark.parametrize(
    ("string", "told"),
    [
        ("1", "<1>|<2>|<1>|<2> length"),
        ("2", "<1>|<2>|<1>|< stop"),
        ("2><1", "<1>|<2>|<1>|<2> length"),
    ],
)
async def test_no_stop_string_in_the_least_text(head: Head, string: str, told: str) -> None:
    """The text of the first `min_tokens` tokens is not looked at, nor part of a stop string."""
    assert told == await head.texts([1, 2, 1, 2], Stopping((string,), min_tokens=3))


@pytest.mark.parametrize("ignore_end", [True, False])
async def test_ends_are_banned_until_there_are_tokens_enough(head: Head, ignore_end: bool) -> None:
    """As long as fewer tokens came than asked for, the tail must pick none that is an end."""
    pipeline = head.pipeline([1, 2, END])
    stopping = Stopping(token_ids=frozenset({7}), min_tokens=2, ignore_end=ignore_end)
    await head.all(pipeline, max_tokens=3, stopping=stopping)

    assert [context.banned_ids for context in pipeline.contexts] == [(7, END), (7, END), ()]


# --- what the next token depends on ---


async def test_the_plain_answer_depends_on_nothing_else(head: Head) -> None:
    """Without penalties, bias or grammar no context is sent, and each step samples alike."""
    pipeline = head.pipeline([1, 2, END])
    await head.all(pipeline)

    assert pipeline.contexts == [NO_CONTEXT] * 3
    assert pipeline.samplings == [SAMPLING] * 3


@pytest.mark.parametrize("kv_cache", [True, False])
@pytest.mark.parametrize(
    ("penalty", "prompt_ids"),
    [
        (Sampling(frequency_penalty=1), ()),
        (Sampling(presence_penalty=-1), ()),
        (Sampling(repetition_penalty=1.1), (5, 6, 7)),
    ],
)
async def test_penalties_are_told_of_all_tokens_so_far(
    head: Head, kv_cache: bool, penalty: Sampling, prompt_ids: tuple[int, ...]
) -> None:
    """Each step knows every token of the answer, the last one too, and the prompt if it counts."""
    pipeline = head.pipeline([8, 5, 8, END], kv_cache=kv_cache)
    await head.all(pipeline, sampling=penalty)

    assert pipeline.contexts == [
        SamplingContext(prompt_ids=prompt_ids, generated_ids=generated)
        for generated in [(), (8,), (8, 5), (8, 5, 8)]
    ]


async def test_the_prompt_is_told_each_token_once(head: Head) -> None:
    """A repetition penalty asks which tokens there were, not how often or where."""
    pipeline = head.pipeline([END])
    request = GenerationRequest((9, 3, 9, 3), 8, Sampling(repetition_penalty=2))
    async for _ in head.generator.generate(request, lambda: pipeline):
        pass

    assert pipeline.contexts == [SamplingContext(prompt_ids=(3, 9))]


async def test_bias_comes_with_every_step(head: Head) -> None:
    """The tail keeps nothing from step to step."""
    pipeline = head.pipeline([1, END])
    await head.all(pipeline, logit_bias={4: -100.0, 2: 0.5})

    assert pipeline.contexts == [SamplingContext(logit_bias={4: -100.0, 2: 0.5})] * 2


def mask_of(ids: set[int]) -> bytes:
    return sum(1 << i for i in ids).to_bytes(13, "little")


class OneByOne(Constraint):
    """Allows some tokens first, then some others."""

    def __init__(self, allowed: Sequence[set[int]]) -> None:
        self._allowed = iter(allowed)
        self.accepted: list[int] = []

    def allowed(self) -> bytes:
        return mask_of(next(self._allowed))

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


@dataclass
class Steps(Grammar):
    """Allows the same for every answer."""

    allowed: Sequence[set[int]]
    constraints: list[OneByOne] = field(default_factory=list[OneByOne])

    def new_constraint(self) -> OneByOne:
        self.constraints.append(OneByOne(self.allowed))
        return self.constraints[-1]


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_a_grammar_goes_with_the_tokens(head: Head, kv_cache: bool) -> None:
    """Each step has the mask behind the tokens so far; the end is none that the grammar takes."""
    grammar = Steps([{1, 2}, {3}, {END}])
    pipeline = head.pipeline([2, 3, END], kv_cache=kv_cache)
    events = await head.all(pipeline, grammar=grammar)

    assert [event.finish_reason for event in events] == [None, None, "stop"]
    assert [context.allowed for context in pipeline.contexts] == [
        mask_of({1, 2}),
        mask_of({3}),
        mask_of({END}),
    ]
    assert [constraint.accepted for constraint in grammar.constraints] == [[2, 3]]


async def test_answers_do_not_share_where_they_are_in_a_grammar(head: Head) -> None:
    """Each generation of one request follows the grammar from its beginning."""
    grammar = Steps([{1}, {END}])
    texts = [await head.texts([1, END], Stopping(), grammar=grammar) for _ in range(2)]

    assert texts == ["<1>| stop"] * 2
    assert len(grammar.constraints) == 2


async def test_a_grammars_end_is_the_end(head: Head) -> None:
    """With a grammar no end is ignored, and none is banned for coming early."""
    pipeline = head.pipeline([1, END])
    stopping = Stopping(min_tokens=5, ignore_end=True)
    events = await head.all(pipeline, stopping=stopping, grammar=Steps([{1}, {END}]))

    assert events == [TokenEvent("<1>", 1), TokenEvent("", END, "stop")]
    assert [context.banned_ids for context in pipeline.contexts] == [(), ()]


@pytest.mark.parametrize("answer", [3, END, 200, "<1>"])
async def test_a_tail_that_does_not_follow_the_grammar_is_found_out(
    head: Head, answer: int | str
) -> None:
    """A token that was not allowed, an end among them, or no token at all, is never passed on."""
    pipeline = head.pipeline([1, answer])
    events = head.generate(pipeline, grammar=Steps([{1}, {1, 2}]))
    await anext(events)
    with pytest.raises(HopProtocolError, match="does not follow the grammar"):
        await anext(events)

    assert pipeline.closed == 1


class Costly(Steps):
    """Gives up at once."""

    def new_constraint(self) -> OneByOne:
        raise InvalidRequest("too costly", field="response_format")


async def test_a_grammar_that_gives_up_ends_the_answer(head: Head) -> None:
    """What it says is passed on, and the session is freed."""
    pipeline = head.pipeline([1])
    with pytest.raises(InvalidRequest, match="too costly"):
        await head.all(pipeline, grammar=Costly([]))

    assert pipeline.closed == 1


# --- scores ---

SCORING = Sampling(top_logprobs=1)


def scored(token_id: int) -> TokenScore:
    return TokenScore(token_id=token_id, logprob=-0.5 * token_id, top=((token_id, -0.5),))


def told(token_id: int, *prompt_ids: int) -> TailAnswer:
    """What a tail answers that was asked for scores."""
    return TailAnswer(
        token_id=token_id,
        score=scored(token_id),
        prompt_scores=tuple(scored(i) for i in prompt_ids),
    )


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_scores_come_with_their_tokens(head: Head, kv_cache: bool) -> None:
    """Each event has its token's, the end token's too; the first one has the prompt's."""
    pipeline = head.pipeline([told(1, 6, 7), told(END)], kv_cache=kv_cache)
    events = await head.all(pipeline, sampling=SCORING, score_prompt=True)

    assert events == [
        TokenEvent("<1>", 1, score=scored(1), prompt_scores=(scored(6), scored(7))),
        TokenEvent("", END, "stop", score=scored(END)),
    ]
    assert pipeline.scored == [True, False]


async def test_the_prompt_alone_can_be_scored(head: Head) -> None:
    """With max_tokens 0 the one event has the prompt's scores, and no token's."""
    pipeline = head.pipeline([told(1, 6, 7)])
    events = await head.all(pipeline, max_tokens=0, sampling=SCORING, score_prompt=True)

    assert events == [
        TokenEvent("", None, "length", prompt_scores=(scored(6), scored(7)), n_tokens=0)
    ]


@pytest.mark.parametrize(
    "answer",
    [
        TailAnswer(token_id=1, prompt_scores=(scored(6), scored(7))),
        TailAnswer(token_id=1, score=scored(2), prompt_scores=(scored(6), scored(7))),
        told(1),
        told(1, 6),
        told(1, 7, 6),
        told(1, 6, 7, 8),
        TailAnswer(text="<1>"),
    ],
)
async def test_a_tail_that_does_not_tell_scores_is_found_out(
    head: Head, answer: TailAnswer
) -> None:
    """Scores that are missing, or are those of other tokens, are no answer."""
    pipeline = head.pipeline([answer])
    with pytest.raises(HopProtocolError):
        await head.all(pipeline, sampling=SCORING, score_prompt=True)

    assert pipeline.closed == 1
