"""OpenAI's shapes out of answers and chunks, checked with the openai package's own types."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.api.openai import DONE, Shapes, event, token_logprobs, usage
from app.engines.base import Chunk, GenerateRequest, TokenLogprob
from app.events.schema import Sampling
from app.registry.records import KeyRecord
from app.serving.call import Answer, ChatCall
from app.serving.chat import Piece

AT = datetime(2026, 1, 1, tzinfo=UTC)
KEY = KeyRecord("k", "client", "k", AT, None, True)
TOOL_CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class FakeRunning:
    """What the shapes read of a call under way."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)


def shapes(n: int = 1, logprobs: bool = False) -> Shapes:
    request = GenerateRequest(messages=[], sampling=Sampling(temperature=1, max_tokens=4))
    call = ChatCall(request=request, pinned=None, n=n, key=KEY, uid="u", policy="riacho", at=AT)
    return Shapes(call, "whole", [f"choice-{i}" for i in range(n)], "riacho@7", logprobs)


def answer(**fields: Any) -> Answer:
    values: dict[str, Any] = {
        "prompt_ids": (1, 2, 3),
        "token_ids": [4, 5],
        "logprobs": [-0.5, -1.0],
        "details": [TokenLogprob("Hi", -0.5, (("Hi", -0.5), ("Ho", -2.0))), TokenLogprob("!", -1.0)],
        "text": "Hi!",
        "finish_reason": "stop",
    }
    return Answer(**values | fields)


def completion(*answers: Answer, logprobs: bool = False) -> ChatCompletion:
    body = shapes(len(answers), logprobs).completion(FakeRunning(*answers))  # type: ignore[arg-type]
    return ChatCompletion.model_validate_json(json.dumps(body))


def test_completion_is_openais() -> None:
    """The body parses as the openai package's ChatCompletion, with every field in its place."""
    body = completion(answer(), answer(text="Ho", token_ids=[6], finish_reason="length"))
    assert (body.id, body.model, body.created) == ("whole", "riacho@7", int(AT.timestamp()))
    assert [choice.message.content for choice in body.choices] == ["Hi!", "Ho"]
    assert [choice.finish_reason for choice in body.choices] == ["stop", "length"]
    assert [(choice.model_extra or {})["completion_id"] for choice in body.choices] == ["choice-0", "choice-1"]
    assert body.usage is not None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens, body.usage.total_tokens) == (3, 3, 6)
    assert all(choice.logprobs is None for choice in body.choices)


def test_logprobs_are_openais() -> None:
    """Asked for, every token is there with its bytes and its alternatives."""
    [choice] = completion(answer(), logprobs=True).choices
    assert choice.logprobs is not None
    first, second = choice.logprobs.content or []
    assert (first.token, first.logprob, first.bytes) == ("Hi", -0.5, list(b"Hi"))
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("Hi", -0.5), ("Ho", -2.0)]
    assert second.top_logprobs == []


def test_calls_without_text_have_no_content() -> None:
    """A message of tool calls alone has content null, and calls without the stream's index."""
    [choice] = completion(answer(text="", tool_calls=[TOOL_CALL], finish_reason="tool_calls")).choices
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "f", "{}")
    assert "index" not in (call.model_extra or {})


def test_reasoning_is_apart_and_only_where_there_is_some() -> None:
    """`reasoning_content` as other OpenAI-compatible servers have it, in the message and in the deltas."""
    [choice] = completion(answer(reasoning="hm")).choices
    assert (choice.message.content, (choice.message.model_extra or {})["reasoning_content"]) == ("Hi!", "hm")
    assert "reasoning_content" not in (completion(answer()).choices[0].message.model_extra or {})
    assert shapes().piece(Piece(0, Chunk(reasoning="h")))["choices"][0]["delta"] == {"reasoning_content": "h"}


def test_empty_answer_has_empty_content() -> None:
    """An answer that ended at once has content "", which is not null: there is no tool call either."""
    [choice] = completion(answer(text="")).choices
    assert choice.message.content == ""
    assert choice.message.tool_calls is None


def chunk(body: dict[str, Any]) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate_json(json.dumps(body))


def test_chunks_are_openais() -> None:
    """Opening, text, calls, end and usage parse as ChatCompletionChunk and share one head."""
    made = shapes(2)
    opening = chunk(made.opening(1))
    text = chunk(made.piece(Piece(1, Chunk(text="Hi"))))
    calls = chunk(made.piece(Piece(0, Chunk(tool_calls=(TOOL_CALL,), finish_reason="tool_calls"))))
    total = chunk(made.usage_chunk(FakeRunning(answer(), answer())))  # type: ignore[arg-type]
    assert {part.id for part in (opening, text, calls, total)} == {"whole"}
    assert opening.choices[0].delta.role == "assistant"
    assert (text.choices[0].index, text.choices[0].delta.content) == (1, "Hi")
    assert text.choices[0].finish_reason is None
    [call] = calls.choices[0].delta.tool_calls or []
    assert call.index == 0
    assert calls.choices[0].finish_reason == "tool_calls"
    assert total.choices == []
    assert total.usage is not None
    assert total.usage.completion_tokens == 4


def test_delta_has_only_what_is_new() -> None:
    """A chunk without text has no content at all: clients concatenate."""
    body = shapes().piece(Piece(0, Chunk(finish_reason="length")))
    assert body["choices"][0]["delta"] == {}


@pytest.mark.parametrize("logprobs", [False, True])
def test_deltas_have_logprobs_if_asked_for(logprobs: bool) -> None:
    """Streamed logprobs are those of the chunk's tokens."""
    piece = Piece(0, Chunk(text="Hi", token_ids=(4,), logprobs=(-0.5,), details=(TokenLogprob("Hi", -0.5),)))
    found = shapes(logprobs=logprobs).piece(piece)["choices"][0]["logprobs"]
    assert (found is not None) is logprobs
    if logprobs:
        assert found == token_logprobs(piece.chunk.details)


def test_event_is_one_line() -> None:
    """Text with line ends and any script stays one server-sent event, as UTF-8."""
    sent = event({"text": "a\nb\r\n\u2028 \N{SNOWMAN}"})
    assert sent.startswith(b"data: ")
    assert sent.endswith(b"\n\n")
    assert sent.count(b"\n") == 2
    assert b"\r" not in sent
    assert json.loads(sent.removeprefix(b"data: "))["text"] == "a\nb\r\n\u2028 \N{SNOWMAN}"
    assert DONE == b"data: [DONE]\n\n"


def test_usage_counts_the_prompt_once() -> None:
    """Whatever n, the prompt was read for one bill; every sampled token counts."""
    assert usage([answer(), answer(token_ids=[1] * 5)]) == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
    }
