"""The OpenAI endpoint as a terminal needs it: one streamed answer, and where its time went."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Self

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from meshnet.wire.headers import TIMING
from services.cli.errors import BadOption, CliError
from services.cli.serving import is_loopback

# The head may wait for a lost shard for a minute, and a step of a slow one takes its time.
_TIMEOUT: Final = httpx.Timeout(5.0, read=300.0)
_TIMING: Final = ": server-timing "
"""How the comment begins that tells where the time went."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        text: All of it.
        n_tokens: Generated tokens, the end token included.
        first_s: Seconds from the request to the first text.
        rest_s: Seconds from there to the end.
        finish_reason: `stop` or `length`.
        timing: Where the time went, as `Server-Timing` has it; "" if that was not told.
    """

    text: str
    n_tokens: int
    first_s: float
    rest_s: float
    finish_reason: str | None
    timing: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token; None if there was no second."""
        return (self.n_tokens - 1) / self.rest_s if self.n_tokens > 1 and self.rest_s else None


class HopTime(BaseModel):
    """One hop's recent decode steps, medians in milliseconds; None is not known."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    endpoint: str
    layers: str | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    queue_ms: float | None = None


class _Cluster(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    hops: list[HopTime] = []


class ChatClient:
    """Asks a model that an endpoint serves.

    Args:
        url: The base URL, `/v1` included.
        model: None is the first one listed there.
        max_tokens: The longest answer.
        temperature: None leaves it to the server.
        api_key: None shows none.
        timed: Have every answer be as long as it may be, and tell where its time went.
        transport: Instead of the network, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        max_tokens: int,
        model: str | None = None,
        temperature: float | None = None,
        api_key: str | None = None,
        timed: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = _parse(url)
        self._options: dict[str, object] = {"max_tokens": max_tokens}
        if temperature is not None:
            self._options["temperature"] = temperature
        shown = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        if timed:
            self._options["ignore_eos"] = True
            shown[TIMING] = "1"
        self._model = model
        self._http = httpx.Client(
            base_url=self._url,
            headers=shown,
            timeout=_TIMEOUT,
            trust_env=not is_loopback(self._url.host),  # no proxy between us and ourselves
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def ask(self, messages: Sequence[dict[str, str]], show: Callable[[str], None]) -> Answer:
        """Ask, and hand every piece of the answer to `show` as it comes.

        Raises:
            CliError: The endpoint cannot be reached, refused, or broke off.
        """
        request = {
            "model": self._served_model(),
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        with self._errors():
            started = perf_counter()
            with self._http.stream("POST", "chat/completions", json=request) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                return _read_answer(response, started, show)

    def hop_times(self) -> list[HopTime]:
        """Where the time of recent steps went; nothing if the endpoint does not tell."""
        with self._errors():
            response = self._http.get("cluster")
        try:
            return _Cluster.model_validate_json(response.content).hops
        except ValidationError:  # some other OpenAI server
            return []

    def _served_model(self) -> str:
        if self._model is None:
            with self._errors():
                response = self._http.get("models")
            if response.is_error:
                raise _refusal(response)
            try:
                self._model = str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise CliError(f"{self._url} is no OpenAI endpoint with a model") from error
        return self._model

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise CliError(
                f"--url: {self._url} cannot be reached ({error}); is a head running there?"
            ) from error
        except httpx.TimeoutException as error:
            raise CliError(f"{self._url} did not answer in time") from error
        except httpx.HTTPError as error:
            raise CliError(f"{self._url} broke off: {error}") from error


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url.rstrip("/") + "/")
    except httpx.InvalidURL as error:
        raise BadOption("--url", f"{url!r} is no URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise BadOption("--url", f"{url!r} is no URL", "http://HOST:PORT/v1")
    return parsed


def _read_answer(response: httpx.Response, started: float, show: Callable[[str], None]) -> Answer:
    texts: list[str] = []
    first = None
    n_tokens, finish_reason = 0, None
    comments: list[str] = []
    for event in _events(response, comments):
        if event.get("usage"):
            n_tokens = int(event["usage"]["completion_tokens"])
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content")
            if text:
                first = first or perf_counter()
                texts.append(text)
                show(text)
            finish_reason = choice.get("finish_reason") or finish_reason
    ended = perf_counter()
    first = first or ended
    timing = next((c.removeprefix(_TIMING) for c in comments if c.startswith(_TIMING)), "")
    text = "".join(texts)
    return Answer(text, n_tokens, first - started, ended - first, finish_reason, timing)


def _events(response: httpx.Response, comments: list[str]) -> Generator[dict[str, Any]]:
    """The events' data up to `[DONE]`; comments are added to `comments`.

    Raises:
        CliError: An event is an error, or the stream ended without `[DONE]`.
    """
    is_done = False
    for line in response.iter_lines():
        if line.startswith(":"):
            comments.append(line)
        data = line.removeprefix("data:").strip() if line.startswith("data:") else None
        is_done = is_done or data == "[DONE]"
        if data and not is_done:
            try:
                event: dict[str, Any] = json.loads(data)
            except ValueError as error:
                raise CliError(f"the answer holds an event that is no JSON: {data[:80]}") from error
            if "error" in event:
                raise CliError(_message_of(event))
            yield event
    if not is_done:
        raise CliError("the answer broke off")


def _refusal(response: httpx.Response) -> CliError:
    try:
        message = _message_of(response.json())
    except ValueError:
        message = response.text[:200] or response.reason_phrase
    return CliError(f"the endpoint answered {response.status_code}: {message}")


def _message_of(body: Any) -> str:  # noqa: ANN401  # JSON of some server
    try:
        return str(body["error"]["message"])
    except (LookupError, TypeError):
        return str(body)[:200]
