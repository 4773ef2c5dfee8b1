"""What the fuzzer reads of an answer."""

from __future__ import annotations

from fastapi import FastAPI

from benchmarks.fuzz.raw_http import Answer, Request, exchange
from tests.support.serving import serve


async def test_an_answer_that_comes_before_a_long_request_has_ended_is_read() -> None:
    """A parser refuses headers that are too long while they come, and closes: a reset follows."""
    request = Request("POST", "/", ((b"Host", b"x"), (b"X-Long", b"x" * 500_000)))
    async with serve(FastAPI()) as served:
        answers = [await exchange(served.port, request.encode()) for _ in range(10)]

    assert [answer.status for answer in answers if isinstance(answer, Answer)] == [400] * 10
