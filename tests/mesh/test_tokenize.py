"""The token endpoints over HTTP, as lm_eval's remote tokenizer and vLLM's clients use them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx
import pytest
import pytest_asyncio

from services.head.settings import HopSetting, ModelSetting
from tests.support.answers import answer, refusal
from tests.support.fake_mesh import byte_tokenizer
from tests.support.mesh import serve_head

# One loop and one head for the whole file. It needs no shard.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

NOWHERE = "http://127.0.0.1:9"
END = "<|end|>"
USER = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncGenerator[httpx.AsyncClient]:
    async with serve_head([NOWHERE], byte_tokenizer(512)) as (_, made):
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def of_two() -> AsyncGenerator[httpx.AsyncClient]:
    """A head of two models, neither of which can be reached."""
    models = tuple(
        ModelSetting(model=name, route=(HopSetting(endpoint=NOWHERE),)) for name in ("one", "two")
    )
    tokenizer = byte_tokenizer(512)
    async with serve_head([], tokenizer, model=None, models=models) as (_, made):
        yield made


async def test_remote_tokenizer_of_lm_eval_works(client: httpx.AsyncClient) -> None:
    """Its calls, in its order: the end token's id, a text's ids, and their text again."""
    info = (await client.get("/tokenizer_info")).json()
    end = await answer(client, "/tokenize", prompt=info["eos_token"], add_special_tokens=False)
    ids = await answer(client, "/tokenize", prompt="héllo", add_special_tokens=False)
    text = await answer(client, "/detokenize", tokens=ids["tokens"])

    assert info["eos_token"] == END
    assert {"bos_token", "pad_token", "chat_template"} <= info.keys()
    assert end["tokens"] == [256]
    assert (ids["count"], ids["max_model_len"], ids["token_strs"]) == (6, 512, None)
    assert text == {"prompt": "héllo"}


async def test_conversation_is_tokenized_as_a_chat(client: httpx.AsyncClient) -> None:
    """The ids are those of the rendered conversation, and each can be told as text."""
    told = await answer(client, "/tokenize", messages=USER, return_token_strs=True)

    assert "".join(told["token_strs"]) == "user:hello\n"
    assert len(told["tokens"]) == told["count"] == len(told["token_strs"])


async def test_head_requests_are_answered(client: httpx.AsyncClient) -> None:
    """Whether there is a tokenizer can be asked without its text."""
    response = await client.head("/tokenizer_info")

    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("path", ["/v1/tokenize", "/v1/detokenize"])
async def test_they_are_not_under_v1(client: httpx.AsyncClient, path: str) -> None:
    """Their place is vLLM's."""
    assert (await client.post(path, json={})).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ x }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["5"]}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [99999999]}, "tokens"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    """The status is 400 and the error has OpenAI's shape."""
    status, error = await refusal(client, path, **body)

    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_what_is_no_json_object_is_refused(client: httpx.AsyncClient, path: str) -> None:
    """NaN, a list and no JSON at all are 400, another media type 415."""
    for content in (b'{"prompt": NaN}', b"[]", b"", b"prompt=a"):
        headers = {"content-type": "application/json"}
        response = await client.post(path, content=content, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, None)
    form = await client.post(path, data={"prompt": "a"})
    assert form.status_code == 415


async def test_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    """A model that is named must be served, also where there is only one."""
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await refusal(client, path, **body, model="nope"))[0] == 404
        assert (await client.post(path, json={**body, "model": "fake"})).status_code == 200
    assert (await client.get("/tokenizer_info?model=nope")).status_code == 404
    assert (await client.get("/tokenizer_info?model=fake")).status_code == 200


async def test_one_of_several_models_must_be_named(of_two: httpx.AsyncClient) -> None:
    """With two models the request says which; the error lists them."""
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        status, error = await refusal(of_two, path, **body)
        assert (status, error["param"]) == (400, "model")
        assert "allowed: one, two" in (error["message"] or "")
        assert (await of_two.post(path, json={**body, "model": "two"})).status_code == 200
    assert (await of_two.get("/tokenizer_info")).status_code == 400
    assert (await of_two.get("/tokenizer_info?model=one")).status_code == 200


async def test_strays_are_named_in_a_header(client: httpx.AsyncClient) -> None:
    """An unknown field is passed over, and the answer says so."""
    response = await client.post("/tokenize", json={"prompt": "a", "promt": "b"})

    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "promt"


async def test_strict_head_refuses_strays() -> None:
    """With the strict switch a stray is an error at all three kinds of endpoint."""
    strict = serve_head([NOWHERE], byte_tokenizer(512), strict_parameters=True)
    async with strict as (_, client):
        for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"):
            status, error = await refusal(client, path, stray=1)
            assert (status, error["param"]) == (400, "stray")


async def test_long_text_is_bounded_by_the_bodys_limit() -> None:
    """A body that is too long is 413, whatever is in it."""
    async with serve_head([NOWHERE], byte_tokenizer(512), max_body_bytes=1000) as (_, client):
        assert (await refusal(client, "/tokenize", prompt="a" * 1000))[0] == 413
        assert (await answer(client, "/tokenize", prompt="a" * 900))["count"] == 900
