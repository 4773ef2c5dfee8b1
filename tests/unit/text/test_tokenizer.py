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

HELLO = [{"role": "user", "content": "hello"}]


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
