# tokenizers' stubs leave some arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from meshnet.errors import InvalidRequest, ModelError
from meshnet.text.tokenizer import ChatTokenizer
from tests.unit.text.making import (
    BOS_ID,
    END_ID,
    EOS_ID,
    TEMPLATE,
    byte_level_tokenizer,
    save_model,
)

HELLO: list[dict[str, object]] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("model")
    config: dict[str, object] = {
        "eos_token_id": 7,
        "num_hidden_layers": 5,
        "max_position_embeddings": 64,
    }
    save_model(folder, config=config, generation_config={"eos_token_id": [8, END_ID]})
    return ChatTokenizer.load(str(folder))


def load(tmp_path: Path, template: str | None) -> ChatTokenizer:
    return ChatTokenizer.load(str(save_model(tmp_path, template=template)))


def test_a_chat_has_exactly_one_bos(tokenizer: ChatTokenizer) -> None:
    """The template's BOS is the only one, though the tokenizer would add one of its own."""
    ids = tokenizer.encode_chat(HELLO)

    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1


def test_a_chat_is_the_template_and_the_answers_opening(tokenizer: ChatTokenizer) -> None:
    """The ids are those of the rendered template, control tokens and opening included."""
    expected = [
        BOS_ID,
        *tokenizer.encode("[user]hello"),
        END_ID,
        *tokenizer.encode("[assistant]"),
    ]

    assert expected == tokenizer.encode_chat(HELLO)


def test_plain_text_gets_no_special_token(tokenizer: ChatTokenizer) -> None:
    """Encoding a text adds neither BOS nor EOS."""
    assert {BOS_ID, EOS_ID}.isdisjoint(tokenizer.encode("hello world"))


def test_end_tokens_are_those_of_configs_and_tokenizer(tokenizer: ChatTokenizer) -> None:
    """The end tokens are the union of both configs' and the tokenizer's own."""
    assert frozenset({7, 8, END_ID, EOS_ID}) == tokenizer.end_token_ids


def test_facts_of_the_model_are_at_hand(tokenizer: ChatTokenizer) -> None:
    """Vocabulary, layers and context are those of the files."""
    assert byte_level_tokenizer().get_vocab_size() == tokenizer.vocab_size
    assert (tokenizer.n_layers, tokenizer.max_positions) == (5, 64)


def test_detokenizers_are_independent(tokenizer: ChatTokenizer) -> None:
    """Each choice has a stream of its own."""
    first, second = tokenizer.new_detokenizer(), tokenizer.new_detokenizer()
    for token_id in tokenizer.encode("🌶")[:-1]:
        first.push(token_id)

    assert "".join(map(second.push, tokenizer.encode("hello"))) == "hello"


def test_developer_is_system_for_a_template_that_does_not_know_it(tokenizer: ChatTokenizer) -> None:
    """`developer` gives the same prompt as `system`, unless the template says otherwise."""
    system, developer = (
        tokenizer.encode_chat([{"role": role, "content": "be kind"}, *HELLO])
        for role in ("system", "developer")
    )

    assert system == developer


def test_developer_stays_where_the_template_names_it(tmp_path: Path) -> None:
    """A template that names `developer` gets it as it is."""
    tokenizer = load(tmp_path, TEMPLATE + "{# knows developer #}")
    ids = tokenizer.encode_chat([{"role": "developer", "content": "be kind"}])

    assert tokenizer.encode("[developer]be kind") == ids[1 : ids.index(END_ID)]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{{ messages[0].tool.name }}", "has no attribute 'tool'"),
    ],
)
def test_what_the_template_refuses_is_the_clients_fault(
    tmp_path: Path, template: str, text: str
) -> None:
    """An error in the template names `messages` and carries the template's text."""
    with pytest.raises(InvalidRequest, match=f"messages: .*template refuses.*{text}") as caught:
        load(tmp_path, template).encode_chat(HELLO)

    assert caught.value.members["field"] == "messages"


def test_a_templates_error_does_not_copy_the_input(tmp_path: Path) -> None:
    """At most 200 characters of a template's text are repeated."""
    tokenizer = load(tmp_path, "{{ raise_exception(messages[0].content) }}")
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_chat([{"role": "user", "content": "x" * 10_000}])

    assert caught.value.message.count("x") == 200


def test_a_base_model_cannot_chat(tmp_path: Path) -> None:
    """A model without a template answers a chat with a clear error, and can still encode."""
    tokenizer = load(tmp_path, None)

    assert tokenizer.encode("hello")
    with pytest.raises(InvalidRequest, match="has no chat template"):
        tokenizer.encode_chat(HELLO)


def test_a_tokenizers_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """A tokenizer.json that cuts or fills to 4 tokens neither cuts nor fills prompts here."""
    backend = byte_level_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    tokenizer = ChatTokenizer.load(str(save_model(tmp_path, tokenizer=backend)))
    text = "a b c d e f g h"

    assert len(text) == len(tokenizer.encode(text))
    assert len(text) < len(tokenizer.encode_chat([{"role": "user", "content": text}])) < 100


def test_many_threads_encode_alike(tokenizer: ChatTokenizer) -> None:
    """Chats encoded in several threads at once are what one thread makes of them."""
    chats = [[{"role": "user", "content": "hello " * n}] for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert [tokenizer.encode_chat(c) for c in chats] == list(
            pool.map(tokenizer.encode_chat, chats)
        )


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    """A folder with weights and config only is refused, naming tokenizer.json."""
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(ModelError, match=r"has no tokenizer\.json; allowed: a folder"):
        ChatTokenizer.load(str(tmp_path))


def test_a_broken_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    """A cut tokenizer.json is a ModelError that names the folder."""
    path = save_model(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text()[:500])

    with pytest.raises(ModelError, match=rf"tokenizer in {tmp_path} is broken"):
        ChatTokenizer.load(str(tmp_path))


def test_a_tokenizer_that_cannot_stream_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that is not backed by the `tokenizers` library cannot be streamed."""

    def from_pretrained(*_: object, **__: object) -> object:
        return object()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)

    with pytest.raises(ModelError, match="no tokenizer of the `tokenizers` library"):
        ChatTokenizer.load(str(save_model(tmp_path)))


TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALLED: list[dict[str, object]] = [
    *HELLO,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": {}}}],
    },
    {"role": "tool", "content": "5", "tool_call_id": "1"},
]
SHOWN = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
NOTATION = '<tool_call>{"name": ..., "arguments": ...}</tool_call>'
CALLS = "{% for message in messages %}{{ message.tool_calls }}{% endfor %}"


def prompt_of(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_a_template_that_knows_tools_tells_them_itself(tmp_path: Path) -> None:
    """Tools, calls and results go to such a template as they are."""
    tokenizer = load(tmp_path, SHOWN + NOTATION + CALLS + TEMPLATE)
    prompt = prompt_of(tokenizer, tokenizer.encode_chat(CALLED, tools=[TOOL]))

    assert prompt.startswith("weather" + NOTATION)
    assert "'arguments': {}" in prompt
    assert "[tool]5" in prompt
    assert "<tool_response>" not in prompt


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        NOTATION + TEMPLATE,
        SHOWN + "Call [weather()]" + TEMPLATE,
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE,
    ],
)
def test_tools_are_told_in_text_where_the_template_does_not(tmp_path: Path, template: str) -> None:
    """A template that drops tools, refuses them, or asks for what we cannot read, gets text."""
    tokenizer = load(tmp_path, template)
    prompt = prompt_of(tokenizer, tokenizer.encode_chat(CALLED, tools=[TOOL]))

    assert "[system]# Tools" in prompt
    assert '{"name": "weather", "arguments": {}}\n</tool_call>' in prompt
    assert "[user]<tool_response>\n5\n</tool_response>" in prompt


def test_calls_of_the_past_are_told_without_tools_too(tokenizer: ChatTokenizer) -> None:
    """A conversation with calls keeps them when no tools are offered any more."""
    prompt = prompt_of(tokenizer, tokenizer.encode_chat(CALLED))

    assert '[assistant]<tool_call>\n{"name": "weather", "arguments": {}}' in prompt
    assert "# Tools" not in prompt


def test_a_template_is_trusted_with_tools_where_its_calls_can_be_read(tmp_path: Path) -> None:
    """A response template that knows calls makes any notation readable."""
    response = {
        "start_anchor": "[assistant]",
        "fields": {"content": {}, "tool_calls": {"open": "[", "close": "]", "content": "json"}},
    }
    folder = save_model(tmp_path, template=SHOWN + TEMPLATE, response_template=response)
    tokenizer = ChatTokenizer.load(str(folder))

    assert prompt_of(tokenizer, tokenizer.encode_chat(HELLO, tools=[TOOL])).startswith("weather")


@pytest.mark.parametrize(
    "response", [{"fields": {}}, [], {"start_anchor": "x", "fields": {"a": 1}}]
)
def test_a_broken_response_template_is_a_model_error(tmp_path: Path, response: object) -> None:
    """A response template that transformers does not take is refused when the model is loaded."""
    folder = save_model(tmp_path, response_template=response)

    with pytest.raises(ModelError, match=r"response_template in .* is broken"):
        ChatTokenizer.load(str(folder))


def test_the_last_message_is_continued(tokenizer: ChatTokenizer) -> None:
    """The prompt ends inside the assistant's message, blanks included, and opens no answer."""
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)

    assert prompt_of(tokenizer, ids) == "<s>[user]hello<|end|>[assistant]Well, "


def test_an_answer_need_not_be_opened(tokenizer: ChatTokenizer) -> None:
    """Without a generation prompt the prompt ends with the last message."""
    ids = tokenizer.encode_chat(HELLO, add_generation_prompt=False)

    assert prompt_of(tokenizer, ids) == "<s>[user]hello<|end|>"


@pytest.mark.parametrize(
    ("messages", "opened", "problem"),
    [
        (HELLO, False, "the last message is not the assistant's"),
        ([*HELLO, {"role": "assistant", "content": "a"}], True, "contradicts"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    tokenizer: ChatTokenizer, messages: list[dict[str, object]], opened: bool, problem: str
) -> None:
    """Only the assistant's message goes on, and not while another one is opened."""
    with pytest.raises(InvalidRequest, match=f"^continue_final_message: {problem}") as caught:
        tokenizer.encode_chat(messages, add_generation_prompt=opened, continue_final_message=True)

    assert caught.value.members["field"] == "continue_final_message"


def test_the_template_is_told_more_variables(tmp_path: Path) -> None:
    """A variable of the client's reaches the template, of any JSON type."""
    tokenizer = load(tmp_path, "{{ mood }}{{ deep.list[1] }}{{ messages[0].content }}")
    ids = tokenizer.encode_chat(
        HELLO, template_variables={"mood": "glad", "deep": {"list": [1, 2]}}
    )

    assert prompt_of(tokenizer, ids) == "glad2hello"


@pytest.mark.parametrize(
    "name",
    ["self", "messages", "conversation", "tools", "chat_template", "tokenize", "bos_token"],
)
def test_a_variable_cannot_take_a_name_that_is_taken(tokenizer: ChatTokenizer, name: str) -> None:
    """What transformers takes or tells the template itself is refused by name."""
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs: {name} is taken") as caught:
        tokenizer.encode_chat(HELLO, template_variables={name: "x"})

    assert caught.value.members["field"] == "chat_template_kwargs"


def test_variables_are_few_and_short(tokenizer: ChatTokenizer) -> None:
    """More than 16 variables, or more than 16384 characters of them, are refused."""
    many = {f"v{number}": number for number in range(17)}
    with pytest.raises(InvalidRequest, match="are 17; allowed: at most 16"):
        tokenizer.encode_chat(HELLO, template_variables=many)
    with pytest.raises(InvalidRequest, match="are too long; allowed: at most 16384"):
        tokenizer.encode_chat(HELLO, template_variables={"v": "x" * 16_384})

    many.popitem()
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode_chat(HELLO, template_variables=many)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ n // 0 }}",
        "{% for i in range(n) %}{% endfor %}",
    ],
)
def test_no_template_fails_as_if_the_fault_were_ours(tmp_path: Path, template: str) -> None:
    """Endless recursion, division by nothing and endless loops are answered as the client's."""
    with pytest.raises(InvalidRequest, match="template refuses"):
        load(tmp_path, template).encode_chat(HELLO, template_variables={"n": 10**12})


def test_tokens_are_bytes_and_text(tokenizer: ChatTokenizer) -> None:
    """A token's bytes are its own; as text, a part of a character is U+FFFD."""
    ids = tokenizer.encode("a🌶")

    assert b"".join(map(tokenizer.token_bytes, ids)) == "a🌶".encode()
    assert tokenizer.token_text(ids[0]) == "a"
    assert tokenizer.token_text(ids[1]) == "\ufffd"
    assert tokenizer.token_text(END_ID) == "<|end|>"
    assert tokenizer.token_text(10**6) == ""


@pytest.mark.parametrize(("add", "first"), [(True, [BOS_ID]), (False, [])])
def test_a_prompt_is_encoded_as_the_tokenizer_has_it(
    tokenizer: ChatTokenizer, add: bool, first: list[int]
) -> None:
    """A bare prompt gets the tokenizer's own BOS, unless that is not wanted."""
    expected = [*first, *tokenizer.encode("hello"), END_ID]

    assert expected == tokenizer.encode_prompt("hello<|end|>", add_special_tokens=add)
    assert tokenizer.decode(expected).endswith("hello<|end|>")


def test_a_tokenizer_describes_itself(tokenizer: ChatTokenizer) -> None:
    """Class, named special tokens and chat template are told; what is not there is null."""
    assert tokenizer.describe() == {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": None,
        "unk_token": None,
        "chat_template": TEMPLATE,
    }
