"""The vLLM engine against scripted answers: what goes wrong on the wire is said, and nothing is made up."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.engines.base import Adapter, Chunk, EngineInfo, GenerateRequest
from app.engines.vllm import VllmClient
from app.engines.vllm_wire import chat_body, event_data
from app.errors import AdapterRejected, ContextTooLong, InvalidRequest, RiachoError, Unavailable
from app.events.schema import Sampling
from tests.scripted_vllm import HEAD, ScriptedVllm, adapter
from tests.scripted_vllm import token_event as token

REQUEST = GenerateRequest(messages=[{"role": "user", "content": "Hi"}], sampling=Sampling(temperature=1, max_tokens=8))
Handler = Callable[[httpx.Request], httpx.Response]


def stream(*events: dict[str, Any], done: bool = True) -> Handler:
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
    return lambda _: httpx.Response(200, content="".join(lines).encode())


def engine_of(handler: Handler, store: Path = Path("/store"), loaded: tuple[int, ...] = ()) -> VllmClient:
    """An engine that is started, on a scripted server."""
    engine = VllmClient("http://engine", model="base", policy="riacho", store=store, slots=2)
    engine._http = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(handler))
    engine._base, engine.info = "base", EngineInfo("base", "f", "float32", 64, 2)
    engine._loaded.update({version: Adapter("riacho", version, store / str(version)) for version in loaded})
    return engine


async def chunks(handler: Handler, version: int = 0) -> list[Chunk]:
    return [chunk async for chunk in engine_of(handler, loaded=(3,)).generate(REQUEST, version)]


async def test_ids_and_logprobs_arrive_in_order() -> None:
    """Prompt ids come first, then every token with its logprob; the last chunk alone has a finish_reason."""
    got = await chunks(stream(HEAD, token(5, "a"), token(6, "b", "stop"), {"choices": [], "usage": {}}))
    assert got[0].prompt_ids == (1, 2)
    assert [(chunk.token_ids, chunk.logprobs, chunk.text) for chunk in got[1:]] == [
        ((5,), (-0.5,), "a"),
        ((6,), (-0.5,), "b"),
    ]
    assert [chunk.finish_reason for chunk in got] == [None, None, "stop"]


async def test_reasoning_is_apart_from_the_answer() -> None:
    """What the server's parser calls reasoning comes as such; a chunk whose text it holds back still has its token."""
    held = token(6, "</think>")
    held["choices"][0]["delta"] = {}
    got = await chunks(stream(HEAD, token(5, "", reasoning="hm"), held, token(7, "b", "stop")))
    assert [(chunk.reasoning, chunk.text, chunk.token_ids) for chunk in got[1:]] == [
        ("hm", "", (5,)),
        ("", "", (6,)),
        ("", "b", (7,)),
    ]


@pytest.mark.parametrize("counted", [2, 3])
async def test_the_servers_own_count_of_tokens_is_kept(counted: int) -> None:
    """So that tokens which no event brought do not go unnoticed."""
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": counted}}
    got = await chunks(stream(HEAD, token(5, "a"), token(6, "b", "stop"), usage))
    assert [chunk.sampled for chunk in got] == [None, None, counted]


async def test_a_missing_logprob_is_not_patched() -> None:
    """Counts that differ stay different, so that capture marks the answer."""
    bare = {"choices": [{"index": 0, "delta": {}, "token_ids": [5, 6], "finish_reason": "stop"}]}
    got = await chunks(stream(HEAD, bare))
    assert (got[-1].token_ids, got[-1].logprobs) == ((5, 6), ())


@pytest.mark.parametrize("reason", ["repetition", "error"])
async def test_an_unknown_end_is_no_answer(reason: str) -> None:
    """A finish_reason that nothing here knows is an error and not a normal end."""
    with pytest.raises(Unavailable, match=reason):
        await chunks(stream(HEAD, token(5, "a", reason)))


@pytest.mark.parametrize("done", [True, False])
async def test_a_stream_that_stops_short_is_an_error(done: bool) -> None:
    """Without a finish_reason the answer is not whole, whatever follows."""
    with pytest.raises(Unavailable, match="before it was whole"):
        await chunks(stream(HEAD, token(5, "a"), done=done))


async def test_a_connection_lost_in_mid_stream_is_an_error() -> None:
    """What was sampled is handed on, and then the loss is raised."""

    async def body() -> AsyncIterator[bytes]:
        yield f"data: {json.dumps(HEAD)}\n\ndata: {json.dumps(token(5, 'a'))}\n\n".encode()
        raise httpx.ReadError("reset")

    generation = engine_of(lambda _: httpx.Response(200, content=body())).generate(REQUEST, 0)
    assert [(await anext(generation)).token_ids for _ in range(2)] == [(), (5,)]
    with pytest.raises(Unavailable, match="lost"):
        await anext(generation)


@pytest.mark.parametrize(
    ("status", "error", "expected", "param"),
    [
        (400, {"message": "bad", "param": "body.tools.0.function"}, InvalidRequest, "tools.0.function"),
        (400, {"message": "bad", "param": "body.0.text"}, InvalidRequest, "messages.0.text"),
        (400, {"message": "too long", "param": "input_tokens"}, ContextTooLong, "messages"),
        (400, {"message": "This model's maximum context length is 8"}, ContextTooLong, "messages"),
        (500, {"message": "EngineDead"}, Unavailable, None),
        (503, None, Unavailable, None),
    ],
)
async def test_refusals_keep_vllms_message(
    status: int, error: dict[str, Any] | None, expected: type[RiachoError], param: str | None
) -> None:
    """The client hears what vLLM said, in the shape of our errors."""
    body = b"" if error is None else json.dumps({"error": error}).encode()
    with pytest.raises(expected) as refused:
        await chunks(lambda _: httpx.Response(status, content=body))
    assert refused.value.param == param
    assert (error or {}).get("message", "503") in refused.value.message


async def test_an_error_event_is_raised() -> None:
    """vLLM reports some errors inside a stream of status 200."""
    with pytest.raises(InvalidRequest, match="out-of-vocab"):
        await chunks(stream({"error": {"message": "out-of-vocab", "param": "logit_bias", "code": 400}}))


async def test_a_version_that_the_server_lost_is_loaded_again() -> None:
    """After a 404 the version no longer counts as loaded, so that the deployer loads it."""
    engine = engine_of(lambda _: httpx.Response(404, json={"error": {"message": "no such model"}}), loaded=(3,))
    with pytest.raises(Unavailable, match="riacho@3"):
        await anext(engine.generate(REQUEST, 3))
    assert engine.loaded() == frozenset()


async def test_events_end_at_line_feeds_only() -> None:
    """U+2028 inside a text is no end of line, and events may arrive cut anywhere."""
    raw = 'data: {"text": "a\u2028b\x85c"}\r\n\r\n: comment\n\ndata: [DONE]\n\n'.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(len(raw)):
            yield raw[at : at + 1]

    assert [event async for event in event_data(pieces())] == [{"text": "a\u2028b\x85c"}]


def test_every_sampling_parameter_is_named() -> None:
    """No default of the server has a say; an answer is never longer than the context."""
    sampling = Sampling(temperature=1e-9, max_tokens=10_000, seed=0)
    body = chat_body(GenerateRequest(REQUEST.messages, sampling, tools=[{}], tool_choice="none"), "m", 64)
    assert {"top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"} <= body.keys()
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.0, 64, 0)
    assert "tools" not in body


def test_earlier_reasoning_has_vllms_name() -> None:
    """A client sends reasoning_content back as it got it; vLLM hands `reasoning` to the chat template."""
    said = {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}
    [message] = chat_body(GenerateRequest([said], REQUEST.sampling), "m", 64)["messages"]
    assert message == {"role": "assistant", "content": "5", "reasoning": "2 + 3"}


async def test_the_likeliest_alternatives_are_shown() -> None:
    """vLLM lists the sampled token first; cut-off tokens are no alternatives."""
    event = token(5, "c", "stop")
    tops = [("c", -3.0), ("a", -0.1), ("b", -2.0), ("z", -9999.0)]
    event["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [{"token": t, "logprob": p} for t, p in tops]
    request = GenerateRequest(REQUEST.messages, REQUEST.sampling, top_logprobs=2)
    got = [chunk async for chunk in engine_of(stream(HEAD, event)).generate(request, 0)]
    assert got[-1].details[0].top == (("a", -0.1), ("b", -2.0))


async def test_a_foreign_version_is_unloaded_at_start(tmp_path: Path) -> None:
    """A name that the server still has from another store is another adapter; one from ours is taken over."""
    server = ScriptedVllm("a")
    server.names = {"riacho@1": "/elsewhere/1", "riacho@2": str(adapter(tmp_path, 2).path)}
    others = {"other@3": "/x", "riacho@": "/y"}
    server.names |= others
    client = server.client(tmp_path)
    await client.start()
    assert client.loaded() == client.held() == {2}
    assert server.names.keys() == {"riacho@2"} | others.keys()


async def test_what_is_taken_over_proves_itself(tmp_path: Path) -> None:
    """A name from before whose weights are not those in the store is unloaded."""
    server = ScriptedVllm("a")
    server.names = {"riacho@2": str(adapter(tmp_path, 2).path)}
    server.ignores = True
    client = server.client(tmp_path)
    await client.start()
    assert (client.loaded(), server.names) == (frozenset(), {})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters whose files are in order."""
    monkeypatch.setattr("app.engines.vllm.check_adapter", lambda *_: None)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    ("healthy", "expected"), [(True, AdapterRejected), (False, Unavailable)], ids=["healthy", "dead"]
)
async def test_a_failed_load_is_the_adapters_fault_only_if_the_engine_lives(
    tmp_path: Path, healthy: bool, expected: type[RiachoError]
) -> None:
    """A version is rejected for good; a dead engine must not cost one."""
    server = ScriptedVllm("a")
    server.refuse, server.healthy = "the reason", healthy
    client = server.client(tmp_path)
    with pytest.raises(expected, match="the reason"):
        await client.load(adapter(tmp_path, 3))
    assert client.loaded() == frozenset()


@pytest.mark.usefixtures("checked")
async def test_an_adapter_that_is_there_already_is_loaded(tmp_path: Path) -> None:
    """Another app process may have loaded the same version from the same files."""
    server = ScriptedVllm("a")
    client = server.client(tmp_path)
    server.names, server.refuse = {"riacho@3": str(adapter(tmp_path, 3).path)}, "already loaded"
    await client.load(adapter(tmp_path, 3))
    assert client.loaded() == {3}
