"""`POST /v1/chat/completions`."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from litestar import Request, Response, post
from litestar.response import Stream

from app.api.errors import DOCUMENTED
from app.api.openai import DONE, Shapes, event
from app.api.schemas import ChatRequest
from app.engines.base import GenerateRequest
from app.engines.messages import free_tools
from app.errors import InvalidRequest, RiachoError
from app.events.schema import Sampling
from app.registry.records import KeyRecord
from app.services import Services
from app.serving.call import ChatCall
from app.serving.chat import Running
from app.serving.sessions import internal_session

SESSION_HEADER = "x-riacho-session"
VERSION_HEADER = "X-Riacho-Version"
CLIENT_CLOSED = 499


@post("/v1/chat/completions", status_code=200, tags=["serving"], responses=DOCUMENTED)
async def chat_completions(
    data: ChatRequest, request: Request[KeyRecord, None, Any], services: Services
) -> Response[Any]:
    """Answer a conversation, as a whole or as server-sent events."""
    call = chat_call(data, request, services)
    running = services.chat.run(call)
    started = time.perf_counter()
    await running.begin()
    services.metrics.first_token_seconds.observe(time.perf_counter() - started)
    shapes = _shapes(data, call, running, services)
    headers = {VERSION_HEADER: services.versions.name(running.version)}
    if data.stream:
        options = data.stream_options
        body = stream_body(running, shapes, include_usage=options is not None and options.include_usage)
        return Stream(body, media_type="text/event-stream", headers=headers | {"Cache-Control": "no-cache"})
    if not await finished(running, request):
        return Response(None, status_code=CLIENT_CLOSED)
    return Response(shapes.completion(running), headers=headers)


async def finished(running: Running, request: Request[KeyRecord, None, Any]) -> bool:
    """Wait for the answer; false, with the sampling stopped, if the client leaves before."""
    answer = asyncio.create_task(_drain(running))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            await answer
        return answer.done()
    finally:
        leaving.cancel()
        answer.cancel()
        await running.stop()


async def stream_body(running: Running, shapes: Shapes, include_usage: bool) -> AsyncIterator[bytes]:
    """The events of an answer; an error after the first chunk becomes an error event, and then no [DONE]."""
    try:
        for choice in range(running.call.n):
            yield event(shapes.opening(choice))
        async for piece in running.pieces():
            chunk = piece.chunk
            if chunk.text or chunk.reasoning or chunk.tool_calls or chunk.finish_reason or chunk.details:
                yield event(shapes.piece(piece))
        if include_usage:
            yield event(shapes.usage_chunk(running))
        yield DONE
    except RiachoError as error:
        yield event(error.body())
    finally:
        await running.stop()


def chat_call(data: ChatRequest, request: Request[KeyRecord, None, Any], services: Services) -> ChatCall:
    """Check what types cannot, and translate."""
    name, source = session_name(data, request)
    n = data.n or 1
    if name is not None and n > 1:
        raise InvalidRequest("n must be 1 in a session: a session is one trajectory", param="n")
    return ChatCall(
        request=generate_request(data, services.settings.default_max_tokens),
        pinned=services.versions.pinned_version(data.model),
        n=n,
        key=request.user,
        uid=uuid.uuid4().hex,
        policy=services.settings.policy,
        at=services.clock(),
        session=None if name is None else internal_session(request.user, name, source),
        store=data.store is not False,
        trace_id=request.headers.get("traceparent"),
    )


def session_name(data: ChatRequest, request: Request[KeyRecord, None, Any]) -> tuple[str | None, str]:
    """The session that the request names, and where it does so; the header wins."""
    header = request.headers.get(SESSION_HEADER)
    if header is not None:
        return header, "X-Riacho-Session"
    name = (data.metadata or {}).get("session_id")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"metadata.session_id = {name!r}: give a string", param="metadata.session_id")
    return name, "metadata.session_id"


def generate_request(data: ChatRequest, default_max_tokens: int) -> GenerateRequest:
    structured = data.response_format is not None and data.response_format.get("type") != "text"
    sampling = Sampling(
        temperature=1.0 if data.temperature is None else data.temperature,
        top_p=data.top_p or 1.0,
        top_k=max(0, data.top_k or 0),
        min_p=data.min_p or 0.0,
        presence_penalty=data.presence_penalty or 0.0,
        frequency_penalty=data.frequency_penalty or 0.0,
        logit_bias=bool(data.logit_bias),
        structured=structured or data.tool_choice == "required" or isinstance(data.tool_choice, dict),
        seed=data.seed,
        max_tokens=data.max_completion_tokens or data.max_tokens or default_max_tokens,
        stop=(data.stop,) if isinstance(data.stop, str) else tuple(data.stop or ()),
    )
    return GenerateRequest(
        messages=[message.model_dump(exclude_none=True) for message in data.messages],
        sampling=sampling,
        tools=free_tools(data.tools) if data.tools else None,
        top_logprobs=data.top_logprobs or 0,
        logit_bias={int(token): bias for token, bias in (data.logit_bias or {}).items()},
        response_format=data.response_format,
        tool_choice=data.tool_choice,
    )


def _shapes(data: ChatRequest, call: ChatCall, running: Running, services: Services) -> Shapes:
    sign = services.receipts.sign
    return Shapes(
        call,
        sign(call.whole_receipt),
        [sign(call.receipt(choice)) for choice in range(call.n)],
        services.versions.name(running.version),
        bool(data.logprobs),
        data.parallel_tool_calls is not False,
    )


async def _drain(running: Running) -> None:
    async for _ in running.pieces():
        pass


async def _disconnected(request: Request[KeyRecord, None, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
