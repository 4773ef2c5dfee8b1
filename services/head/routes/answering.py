"""The one way from a checked request to its response: planned, run over a route, and written."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from time import time  # noqa: TID251  # `created` is a wall-clock second by OpenAI's definition
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from meshnet.head.call import Trace
from meshnet.ids import is_traceparent, new_id
from meshnet.openai.answers import AnswerPlan, Serving
from meshnet.openai.bodies import Heading
from meshnet.openai.choices import merge
from meshnet.openai.sampling_fields import SamplingFields
from meshnet.openai.stream import collect_answer, stream_answer
from meshnet.topology import Route
from meshnet.wire.headers import TRACEPARENT
from services.head.access import caller_name
from services.head.head import Head
from services.head.routes.request import ignored_params, pinned_route
from services.head.served_model import Origin, ServedModel
from services.head.server_timing import SERVER_TIMING, logged, render, wants_timing
from services.head.streaming import open_stream, until_client_leaves

FieldsT = TypeVar("FieldsT", bound=SamplingFields)


async def answer(
    request: Request,
    head: Head,
    fields: FieldsT,
    plan: Callable[[FieldsT, Serving], AnswerPlan],
    kind: str,
) -> Response:
    """Answer a request, in one piece or as a stream.

    Args:
        request: Whose client is watched meanwhile.
        head: Serves the model.
        fields: The checked body.
        plan: What is to be done for it; CPU work, run in a thread.
        kind: How the answer's id begins.

    Raises:
        MeshError: The answer has not begun; once a stream has, it tells an error itself.
        ClientLeft: Nobody waits for it any more.
    """
    model = head.model(fields.model)
    caller = caller_name(request)
    model.check_admission(caller)
    trace, tells_times = _trace(request), wants_timing(request)
    pinned = await pinned_route(request, head, model)
    route = pinned or await model.readiness.route()
    serving = _serving(head, model, route, kind)
    planned = await asyncio.to_thread(plan, fields, serving)
    model.check_admission(caller)  # others came meanwhile
    origin = Origin(caller, trace, route.max_positions, pinned)
    generations = [
        model.generate(one, origin, follows=index > 0)
        for index, one in enumerate(planned.generations)
    ]
    merged = merge([head.metrics.observed(each, model.name) for each in generations])
    events = logged(merged, trace, model.name)
    headers = ignored_params(fields)
    if not fields.stream:
        body = await until_client_leaves(request, collect_answer(events, planned.writer))
        timing = {SERVER_TIMING: render(trace.times)} if tells_times else {}
        return JSONResponse(body, headers=headers | timing)
    chunks = stream_answer(events, planned.writer, request_id=request.state.request_id)
    timing = partial(render, trace.times) if tells_times else None
    return await open_stream(request, chunks, headers, planned.writer.fail, timing)


def _serving(head: Head, model: ServedModel, route: Route, kind: str) -> Serving:
    heading = Heading(
        id=f"{kind}{new_id()}",
        created=int(time()),
        model=model.name,
        system_fingerprint=f"mesh_{route.hops[0].facts.revision[:12]}",
    )
    return Serving(
        tokenizer=model.tokenizer,
        grammars=model.grammars,
        heading=heading,
        max_positions=route.max_positions,
        max_choices=head.settings.max_choices,
        seed=secrets.randbits(63),
    )


def _trace(request: Request) -> Trace:
    given = request.headers.get(TRACEPARENT, "")
    return Trace(request.state.request_id, given if is_traceparent(given) else None)
