# tokenizers' stubs leave some arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from meshnet.text.response_parser import (
    Content,
    ForcedCalls,
    Part,
    Reasoning,
    ResponseParser,
    ToolCall,
    new_parser,
)
from meshnet.text.tokenizer import ChatTokenizer
from tests.unit.text.making import byte_level_tokenizer, save_model

QWEN_TEMPLATE = """\
{%- if tools %}[system]
{%- for tool in tools %}{{ tool | tojson }}
{% endfor %}Call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>
{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if thinking is defined and thinking %}<think>
{% elif thinking is defined %}<think>

</think>

{% endif %}
{%- endif %}"""

QWEN: dict[str, object] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "[assistant]",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|end\|>|</s>)", "content": "text"},
    },
}

XML: dict[str, object] = {
    "start_anchor": "[assistant]",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"content": "text"},
    },
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
PARIS = '{"name": "weather", "arguments": {"city": "Paris 🌶", "days": 2}}'
ROME = '{"arguments": {"city": "<think>"}, "name": "weather"}'
USER = [{"role": "user", "content": "hello"}]


def load(folder: Path, template: str = QWEN_TEMPLATE, response: object = None) -> ChatTokenizer:
    return ChatTokenizer.load(
        str(save_model(folder, template=template, response_template=response))
    )


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """With a response template of its own."""
    return load(tmp_path_factory.mktemp("qwen"), response=QWEN)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Without one; its chat template has the tag of reasoning."""
    return load(tmp_path_factory.mktemp("hermes"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Without one, and without reasoning."""
    return load(tmp_path_factory.mktemp("plain"), template="{{ messages[0].content }}")


@pytest.fixture(params=["qwen", "hermes"])
def either(request: pytest.FixtureRequest) -> ChatTokenizer:
    return request.getfixturevalue(request.param)


def parser_of(
    tokenizer: ChatTokenizer, *, prompt: str = "", parallel: bool = True
) -> ResponseParser:
    prompt_ids = tokenizer.encode(prompt)
    parser = new_parser(tokenizer, prompt_ids, tools=TOOLS, parallel=parallel)
    assert parser is not None
    return parser


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def parse(parser: ResponseParser, texts: list[str]) -> list[object]:
    """The parts, with neighbours of one kind joined and without the ids of calls."""
    parts: list[Part] = []
    for text in texts:
        parts += parser.push(text)
    joined: list[object] = []
    for part in [*parts, *parser.finish()]:
        last = joined[-1] if joined else None
        match last, part:
            case (Content(text), Content(more)):
                joined[-1] = Content(text + more)
            case (Reasoning(text), Reasoning(more)):
                joined[-1] = Reasoning(text + more)
            case _, ToolCall(call_id, name, arguments):
                assert call_id.startswith("call_")
                joined.append((name, arguments))
            case _:
                joined.append(part)
    return joined


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_reasoning_content_and_calls_are_told_apart(either: ChatTokenizer, size: int) -> None:
    """An answer of all three comes out the same in pieces of any size, blanks at tags left out."""
    text = (
        "<think>\nWhich city?\n\nParis.\n</think>\n\nLet me <b>look</b>.\n\n"
        f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{ROME}\n</tool_call>"
    )

    assert parse(parser_of(either), pieces(text, size)) == [
        Reasoning("Which city?\n\nParis."),
        Content("Let me <b>look</b>."),
        ("weather", '{"city": "Paris 🌶", "days": 2}'),
        ("weather", '{"city": "<think>"}'),
    ]


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", PARIS, ROME, "{", "<tool", "\n", "Hi <"]
)


@given(fragments=st.lists(FRAGMENTS | st.text(max_size=3), max_size=12), data=st.data())
def test_how_a_text_is_cut_does_not_matter(
    qwen: ChatTokenizer, hermes: ChatTokenizer, fragments: list[str], data: st.DataObject
) -> None:
    """Any cut of any text, malformed ones among them, gives the same parts."""
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]

    for tokenizer in (qwen, hermes):
        assert parse(parser_of(tokenizer), [text]) == parse(parser_of(tokenizer), cut)


@given(fragments=st.lists(FRAGMENTS.filter(lambda f: "think" not in f) | st.text(max_size=3)))
def test_a_text_without_a_whole_call_is_its_own_content(
    plain: ChatTokenizer, fragments: list[str]
) -> None:
    """Nothing is lost or added where nothing can be read, blanks and broken calls included."""
    text = "".join(fragments).replace("weather", "").replace("name", "")
    expected = [Content(text)] if text else []

    assert parse(parser_of(plain), pieces(text, 3)) == expected


def test_text_that_begins_no_tag_is_not_held_back(either: ChatTokenizer) -> None:
    """Text goes out at once; the beginning of a tag, and blanks before one, wait for the next."""
    parser = parser_of(either)

    assert parser.push("Hello, wor") == [Content("Hello, wor")]
    assert parser.push("ld <tool_") == [Content("ld")]
    assert parser.push("box>") == [Content(" <tool_box>")]
    assert parser.finish() == []


def test_a_call_is_told_when_it_closes(either: ChatTokenizer) -> None:
    """A call comes whole with the end of its tag, not before and not only at the end."""
    parser = parser_of(either)

    assert parser.push(f"<tool_call>{PARIS}</tool_call") == []
    (call,) = parser.push(">")
    assert isinstance(call, ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris 🌶", "days": 2})


def test_each_call_has_an_id_of_its_own(either: ChatTokenizer) -> None:
    """Two equal calls can be told apart by their ids."""
    first, second = parser_of(either).push(f"<tool_call>{PARIS}</tool_call>" * 2)

    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.id != second.id


@pytest.mark.parametrize(
    "body",
    [
        "",
        "weather",
        '{"name": "weather", "arguments": {"city": "Par',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "x"}',
        '{"name": "weather", "arguments": {"days": NaN}}',
        '{"name": "weather", "arguments": {"days": 1e999}}',
        '{"name": "weather", "arguments": {"city": "\\ud83c"}}',
        '{"name": "weather", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"name": "", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        "[]",
        "7",
    ],
)
def test_a_malformed_call_is_content(either: ChatTokenizer, body: str) -> None:
    """What cannot be read as a call is told as the text it is, and what follows is still read."""
    broken = f"<tool_call>{body}</tool_call>"
    parts = parse(parser_of(either), pieces(f"a {broken} b<tool_call>{PARIS}</tool_call>", 7))

    assert parts == [Content(f"a {broken} b"), ("weather", '{"city": "Paris 🌶", "days": 2}')]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "weather"}', "{}"),
        ('{"name": "weather", "arguments": null}', "{}"),
        ('{"name": "weather", "arguments": "{\\"days\\": 3}"}', '{"days": 3}'),
        ('{"name": "weather", "arguments": {"days": "3"}}', '{"days": 3}'),
    ],
)
def test_what_models_do_to_arguments_is_put_right(
    either: ChatTokenizer, body: str, arguments: str
) -> None:
    """Arguments left out, written twice, or a number written as text are what they stand for."""
    parts = parse(parser_of(either), [f"<tool_call>{body}</tool_call>"])

    assert parts == [("weather", arguments)]


def test_a_call_cut_short_is_content(either: ChatTokenizer) -> None:
    """A call that the answer's end cuts is told as text, and none of it is lost."""
    text = f"Well.\n<tool_call>{PARIS[:-1]}"

    assert parse(parser_of(either), [text]) == [Content(text)]


def test_a_whole_call_needs_no_closing_tag_at_the_end(either: ChatTokenizer) -> None:
    """A model that ends its answer behind the call's last brace has made the call."""
    parts = parse(parser_of(either), [f"<tool_call>\n{PARIS}\n"])

    assert parts == [("weather", '{"city": "Paris 🌶", "days": 2}')]


def test_reasoning_cut_short_is_reasoning(either: ChatTokenizer) -> None:
    """Reasoning that the answer's end cuts is told, and is no content."""
    assert parse(parser_of(either), ["<think>\nWell", ", </thi"]) == [Reasoning("Well, </thi")]


def test_content_around_a_call_keeps_its_words_apart(either: ChatTokenizer) -> None:
    """Text before a call and text after it do not run together."""
    text = f"One.\n<tool_call>{PARIS}</tool_call>\nTwo.\n"

    before, _, after = parse(parser_of(either), [text])

    assert before == Content("One.")
    assert after in (Content("\nTwo."), Content("\n\nTwo."))  # as its template's tag has blanks


def test_only_the_first_call_is_told_where_several_are_not_wanted(either: ChatTokenizer) -> None:
    """Without parallel calls the answer has one, whatever the model writes."""
    text = f"<tool_call>{ROME}</tool_call>" + f"<tool_call>{PARIS}</tool_call>" * 2

    assert parse(parser_of(either, parallel=False), [text]) == [("weather", '{"city": "<think>"}')]


def test_without_tools_a_call_is_content(either: ChatTokenizer) -> None:
    """A model that calls what it was not offered has written text; its reasoning is still told."""
    parser = new_parser(either, [])
    assert parser is not None
    text = f"<tool_call>{PARIS}</tool_call>"

    assert parse(parser, [f"<think>a</think>{text}"]) == [Reasoning("a"), Content(text)]


def test_without_tools_and_reasoning_there_is_no_parser(plain: ChatTokenizer) -> None:
    """Where all text is content nothing stands in its way."""
    assert new_parser(plain, []) is None
    assert new_parser(plain, [], tools=TOOLS) is not None


def test_reasoning_is_known_by_its_token_too(tmp_path: Path) -> None:
    """A model that has a token for the tag reasons, though its chat template does not say so."""
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer = ChatTokenizer.load(str(save_model(tmp_path, tokenizer=backend)))
    parser = new_parser(tokenizer, [])
    assert parser is not None

    assert parse(parser, ["<think>a</think>b"]) == [Reasoning("a"), Content("b")]


@pytest.mark.parametrize(
    ("thinking", "text", "parts"),
    [
        (True, "\nSo.\n</think>\n\nHi", [Reasoning("So."), Content("Hi")]),
        (True, "So", [Reasoning("So")]),
        (False, "Hi", [Content("Hi")]),
    ],
)
def test_the_answer_goes_on_where_the_prompt_ends(
    either: ChatTokenizer, thinking: bool, text: str, parts: list[object]
) -> None:
    """Reasoning that the chat template opens, or opens and closes, is not the model's to open."""
    ids = either.encode_chat(USER, template_variables={"thinking": thinking})
    parser = new_parser(either, ids, tools=TOOLS)
    assert parser is not None

    assert parse(parser, pieces(text, 1)) == parts


def test_a_tag_in_the_users_text_opens_nothing(either: ChatTokenizer) -> None:
    """A user who writes about the tags does not turn the answer into reasoning."""
    ids = either.encode_chat([{"role": "user", "content": "what is <think>"}])
    parser = new_parser(either, ids, tools=TOOLS)
    assert parser is not None

    assert parse(parser, ["A tag."]) == [Content("A tag.")]


@pytest.mark.parametrize("begun", ["Hello, \n", "<think>a</think>\nHello, ", "Hello <tool"])
def test_a_continued_message_is_not_told_again(either: ChatTokenizer, begun: str) -> None:
    """Nothing of a message that the answer continues comes out with it, and no blank is lost."""
    ids = either.encode_chat(
        [*USER, {"role": "assistant", "content": begun}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    parser = new_parser(either, ids, tools=TOOLS)
    assert parser is not None

    assert parse(parser, [" wor", "ld"]) == [Content(" world")]


@pytest.mark.parametrize("body", ["{", "{}"])
def test_a_prompt_that_cannot_be_read_is_no_beginning(tmp_path: Path, body: str) -> None:
    """Where the prompt's end does not parse, or to no call, the answer begins on its own."""
    tokenizer = load(tmp_path, response={**QWEN, "start_anchor": "nowhere"})
    parser = parser_of(tokenizer, prompt=f"<tool_call>{body}</tool_call>")

    assert parse(parser, ["Hi"]) == [Content("Hi")]


def test_a_call_in_a_continued_message_counts(qwen: ChatTokenizer) -> None:
    """Where one call is wanted and the message that goes on has it, there is no other."""
    parser = parser_of(qwen, prompt=f"[assistant]<tool_call>{ROME}</tool_call>", parallel=False)
    parts = parse(parser, [f"<tool_call>{PARIS}</tool_call>"])

    assert parts == []


def test_calls_in_xml_are_read_and_cast(tmp_path: Path) -> None:
    """A response template of another notation is followed; arguments have their schema's types."""
    text = (
        "Look:\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    parts = parse(parser_of(load(tmp_path, response=XML)), pieces(text, 5))

    assert parts == [Content("Look:"), ("weather", '{"city": "12", "days": 3}')]


def test_a_call_in_xml_that_is_cut_short_is_content(tmp_path: Path) -> None:
    """XML without its end may lack arguments: it is text, and no call."""
    text = "\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"

    assert parse(parser_of(load(tmp_path, response=XML)), [text]) == [Content(text)]


def test_a_region_that_only_the_end_closes_is_read(tmp_path: Path) -> None:
    """Calls may be a list up to the answer's end; one that cannot be read is content."""
    response: dict[str, object] = {
        "start_anchor": "[assistant]",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "[CALLS]",
                "content": "python-call-list",
                "transform_each": True,
                "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
            },
        },
    }
    tokenizer = load(tmp_path, response=response)
    calls = "[CALLS][weather(city='Rome'), weather(days=2)]"

    assert parse(parser_of(tokenizer), [calls]) == [
        ("weather", '{"city": "Rome"}'),
        ("weather", '{"days": 2}'),
    ]
    assert parse(parser_of(tokenizer, parallel=False), [calls]) == [("weather", '{"city": "Rome"}')]
    assert parse(parser_of(tokenizer), [calls[:-1]]) == [Content(calls[:-1])]


def test_other_regions_are_content(tmp_path: Path) -> None:
    """Whatever else a response template knows is told as content, missing parts are no error."""
    response: dict[str, object] = {
        "start_anchor": "[assistant]",
        "fields": {
            "content": {"optional": False},
            "aside": {"open": "<aside>", "close": "</aside>", "optional": False},
            "data": {"open": "<data>", "close": "</data>", "content": "json"},
        },
    }
    parser = parser_of(load(tmp_path, response=response))

    assert parse(parser, ["<aside>a</aside><data>{}</data>"]) == [Content("a<data>{}</data>")]


def test_a_response_template_without_calls_gets_ours(tmp_path: Path) -> None:
    """A response template that knows reasoning only is completed by Hermes' calls."""
    fields: dict[str, object] = {"content": {}, "thinking": {"open": "[T]", "close": "[/T]"}}
    tokenizer = load(tmp_path, response={"start_anchor": "[assistant]", "fields": fields})
    parts = parse(parser_of(tokenizer), [f"[T]a[/T]<tool_call>{ROME}</tool_call>"])

    assert parts == [Reasoning("a"), ("weather", '{"city": "<think>"}')]


def test_tags_that_are_special_tokens_must_be_in_the_text(tmp_path: Path) -> None:
    """The parser says so where a tag is a special token; end tokens never reach it."""
    response = json.loads(json.dumps(QWEN).replace("<think>", "<|think|>"))
    ended = load(tmp_path / "ended", response=QWEN)
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken("<|think|>", special=True)])
    folder = save_model(
        tmp_path / "special",
        tokenizer=backend,
        template=QWEN_TEMPLATE,
        response_template=response,
        config={"eos_token_id": 2},
    )

    assert parser_of(ChatTokenizer.load(str(folder))).reads_special_tokens
    assert parser_of(ended).reads_special_tokens  # nobody says that <|end|> ends an answer
    folder = save_model(tmp_path / "end", response_template=QWEN, config={"eos_token_id": 2})
    assert not parser_of(ChatTokenizer.load(str(folder))).reads_special_tokens


def forced(text: str, size: int = 1) -> list[object]:
    return parse(ForcedCalls(), pieces(text, size))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_forced_answer_is_its_calls(plain: ChatTokenizer, size: int) -> None:
    """One object or a list of them, with braces and quotes in strings, are calls as written."""
    parser = new_parser(plain, [], tools=TOOLS, forced=True)
    assert isinstance(parser, ForcedCalls)
    one = '{"name":"f","arguments":{"a":"}\\"{[","b":[{}]}}'
    other = '{ "name" : "g", "arguments" : {} }'

    assert parse(parser, pieces(one, size)) == [("f", '{"a":"}\\"{[","b":[{}]}')]
    assert forced(f"[{one}, {other}]", size) == [("f", '{"a":"}\\"{[","b":[{}]}'), ("g", "{}")]
    assert not parser.reads_special_tokens


def test_a_forced_call_is_told_when_it_closes() -> None:
    """The first call of a list does not wait for the second."""
    parser = ForcedCalls()

    assert parser.push('[{"name":"f","arguments":{}') == []
    (call,) = parser.push('},{"na')
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("f", "{}")


@pytest.mark.parametrize("length", range(1, 48))
def test_a_forced_call_cut_short_has_what_there_is(length: int) -> None:
    """Wherever the end cuts a call, its name and the beginning of its arguments are told."""
    name, keys, arguments = '{"name":"weather"', ',"arguments":', '{"city":"Paris"}}'
    text = (name + keys + arguments)[:length]
    begun = text[len(name + keys) :].removesuffix("}}") + "}" * text.endswith("}}")
    whole_name = len(text) >= len(name)

    assert forced(text) == [("weather", begun) if whole_name else Content(text)]


def test_an_empty_forced_answer_has_no_parts() -> None:
    """An answer that was cut before it began is nothing."""
    assert forced("") == []
    assert forced("[") == []
