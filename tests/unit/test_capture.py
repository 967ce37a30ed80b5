"""Capture: what one answer becomes on the log, and what happens when the log cannot take it."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.engines.base import GenerateRequest
from app.errors import RiachoError
from app.events.log import EventRefused, LogUnavailable, Position
from app.events.schema import CompletionEvent, Event, Sampling, decode
from app.events.sqlite import SqliteLog
from app.registry.records import KeyRecord
from app.security.receipts import Receipts
from app.serving.call import Answer, ChatCall
from app.serving.capture import Capture, OnFailure, completion_event
from app.telemetry.metrics import Metrics

AT = datetime(2026, 1, 1, tzinfo=UTC)
RECEIPTS = Receipts(b"s" * 32)
LOST = "riacho_lost_events_total"


def call(sampling: Mapping[str, Any] | None = None, *, store_content: bool = True, **fields: Any) -> ChatCall:
    request = GenerateRequest(
        messages=[{"role": "user", "content": "zebra"}],
        sampling=Sampling(**{"temperature": 1.0, "max_tokens": 16, **(sampling or {})}),
    )
    values: dict[str, Any] = {
        "request": request,
        "pinned": None,
        "n": 1,
        "key": KeyRecord("key1", "client", "k", AT, None, store_content),
        "uid": "u",
        "policy": "riacho",
        "at": AT,
    }
    return ChatCall(**values | fields)


def answer(**fields: Any) -> Answer:
    values: dict[str, Any] = {
        "prompt_ids": (1, 2),
        "token_ids": [3, 4],
        "logprobs": [-0.5, -1.5],
        "text": "the answer",
        "finish_reason": "stop",
    }
    return Answer(**values | fields)


def event(made: ChatCall, given: Answer | None = None, choice: int = 0, version: int = 7) -> CompletionEvent:
    return completion_event(made, choice, given or answer(), version, RECEIPTS.sign(made.receipt(choice)))


def test_event_is_the_answer() -> None:
    """Ids, logprobs, version, key, session, trace and text are those of the call and the answer."""
    made = call(session="key1:s", trace_id="t-1")
    got = event(made)
    assert (got.prompt_ids, got.completion_ids, got.logprobs) == ((1, 2), (3, 4), (-0.5, -1.5))
    assert (got.version, got.key_id, got.session_id, got.trace_id, got.at) == (7, "key1", "key1:s", "t-1", AT)
    assert (got.messages, got.output) == ([{"role": "user", "content": "zebra"}], "the answer")
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (2, 2)
    assert got.trainable
    assert got.event_id == got.completion_id == RECEIPTS.sign(made.receipt(0))


def test_events_of_choices_are_apart() -> None:
    """Two choices of one call: two ids and, without a name, two sessions."""
    made = call(n=2)
    first, second = event(made, choice=0), event(made, choice=1)
    assert first.completion_id != second.completion_id
    assert first.session_id != second.session_id


def test_longest_names_can_be_recorded() -> None:
    """Policy and session names of the full allowed length make a valid event."""
    event(
        call(policy="p" * 32, session="0a1b2c3d:" + "s" * 64, key=KeyRecord("0a1b2c3d", "client", "k", AT, None, True))
    )


def test_unstored_answer_keeps_nothing_but_counts() -> None:
    """store = false: no text, no tokens, no logprobs; usage remains, for the bill."""
    got = event(call(store=False))
    assert (got.prompt_ids, got.completion_ids, got.logprobs, got.messages, got.output) == ((), (), (), None, None)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (2, 2)
    assert not got.trainable
    assert "zebra" not in got.model_dump_json()


def test_key_without_content_keeps_the_tokens() -> None:
    """A key that keeps no content trains all the same: tokens stay, text does not."""
    got = event(call(store_content=False))
    assert (got.messages, got.output) == (None, None)
    assert got.completion_ids == (3, 4)
    assert got.trainable


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"finish_reason": "abort"}, "did not end"),
        ({"finish_reason": None}, "did not end"),
        ({"logprobs": [-0.5, -math.inf]}, "logprob"),
        ({"logprobs": [-0.5, math.nan]}, "logprob"),
    ],
    ids=str,
)
def test_broken_answer_is_not_trainable(fields: dict[str, Any], reason: str) -> None:
    """What did not end, or has no usable logprob for a token, is recorded with the reason."""
    got = event(call(), answer(**fields))
    assert not got.trainable
    assert reason in (got.not_trainable_reason or "")
    assert decode(got.model_dump_json().encode()).type == "completion"


def test_missing_logprob_is_recorded_as_not_trainable() -> None:
    """An engine that loses a logprob costs a training example, not the record of the answer."""
    got = event(call(), answer(logprobs=[-0.5]))
    assert not got.trainable
    assert "logprob" in (got.not_trainable_reason or "")
    assert got.usage.completion_tokens == 2


def test_missing_tokens_are_not_patched() -> None:
    """An engine that counted more tokens than it handed on: those that came stay out, since others belong between."""
    got = event(call(), answer(sampled=3))
    assert not got.trainable
    assert "some token ids are missing" in (got.not_trainable_reason or "")
    assert got.completion_ids == got.logprobs == ()
    assert event(call(), answer(sampled=2)).trainable


def test_shaped_sampling_is_not_trainable() -> None:
    """The sampling rules decide too."""
    assert "top_p" in (event(call({"top_p": 0.5})).not_trainable_reason or "")


class BrokenLog(SqliteLog):
    """A log that takes nothing."""

    error: RiachoError = LogUnavailable("the disk is full")

    async def append(self, event: Event) -> Position:
        raise self.error


def lost(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value(LOST) or 0.0


def recorded(log: SqliteLog) -> Sequence[Event]:
    return [decode(record.payload) for record in log.read({}, 100)]


async def test_record_is_durable_and_counted(tmp_path: Path) -> None:
    """After record() the event is on the log, and its tokens are counted."""
    metrics = Metrics()
    with closing(SqliteLog(tmp_path / "log.db")) as log:
        await Capture(log, RECEIPTS, metrics, "fail_closed").record(call(), 0, answer(), 7)
        assert recorded(log) == [event(call())]
    labels = {"finish_reason": "stop", "trainable": "true"}
    assert metrics.registry.get_sample_value("riacho_completions_total", labels) == 1
    assert metrics.registry.get_sample_value("riacho_tokens_total", {"kind": "completion"}) == 2


@pytest.mark.parametrize("on_failure", ["fail_closed", "fail_open"])
async def test_lost_record_is_counted(tmp_path: Path, on_failure: OnFailure) -> None:
    """A log that takes nothing: fail_closed tells the caller, fail_open answers; both count the loss."""
    metrics = Metrics()
    with closing(BrokenLog(tmp_path / "log.db")) as log:
        capture = Capture(log, RECEIPTS, metrics, on_failure)
        if on_failure == "fail_closed":
            with pytest.raises(LogUnavailable, match="disk is full"):
                await capture.record(call(), 0, answer(), 7)
        else:
            await capture.record(call(), 0, answer(), 7)
    assert lost(metrics) == 1
    assert metrics.registry.get_sample_value("riacho_tokens_total", {"kind": "completion"}) is None


@pytest.mark.parametrize("on_failure", ["fail_closed", "fail_open"])
async def test_refused_record_is_counted(tmp_path: Path, on_failure: OnFailure) -> None:
    """An event that will never fit is a lost record like any other: a 503 or an answer, never a 500."""
    metrics = Metrics()
    with closing(BrokenLog(tmp_path / "log.db")) as log:
        log.error = EventRefused("the event is too large")
        capture = Capture(log, RECEIPTS, metrics, on_failure)
        if on_failure == "fail_closed":
            with pytest.raises(EventRefused, match="too large") as caught:
                await capture.record(call(), 0, answer(), 7)
            assert caught.value.status == 503
        else:
            await capture.record(call(), 0, answer(), 7)
    assert lost(metrics) == 1
    assert metrics.registry.get_sample_value("riacho_refused_events_total") == 1


async def test_record_is_appended_though_the_caller_is_cancelled(tmp_path: Path) -> None:
    """A client that leaves while the log is slow costs no record: it goes to the log, or is counted as lost."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    class SlowLog(SqliteLog):
        async def append(self, event: Event) -> Position:
            begun.set()
            await go_on.wait()
            return await super().append(event)

    with closing(SlowLog(tmp_path / "log.db")) as log:
        capture = Capture(log, RECEIPTS, Metrics(), "fail_closed")
        task = asyncio.create_task(capture.record(call(), 0, answer(), 7))
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()
        await capture.settle()
        assert recorded(log) == [event(call())]


async def test_abort_is_recorded_though_the_caller_is_cancelled(tmp_path: Path) -> None:
    """An answer that is cut off is recorded in the background, as far as it got."""
    with closing(SqliteLog(tmp_path / "log.db")) as log:
        capture = Capture(log, RECEIPTS, Metrics(), "fail_closed")

        async def cut_off() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                capture.record_abort(call(), 0, answer(finish_reason=None), 7)

        task = asyncio.create_task(cut_off())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await capture.settle()
        [got] = recorded(log)
    assert isinstance(got, CompletionEvent)
    assert (got.finish_reason, got.trainable, got.completion_ids) == ("abort", False, (3, 4))


async def test_abort_that_cannot_be_recorded_is_counted(tmp_path: Path) -> None:
    """Nobody is there to hear the error: it is counted, and settling does not fail."""
    metrics = Metrics()
    with closing(BrokenLog(tmp_path / "log.db")) as log:
        capture = Capture(log, RECEIPTS, metrics, "fail_closed")
        capture.record_abort(call(), 0, answer(finish_reason=None), 7)
        await capture.settle()
    assert lost(metrics) == 1


TOOL = {"type": "function", "function": {"name": "now"}}
CALLED = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def with_tools(**fields: Any) -> ChatCall:
    made = call(**fields)
    return replace(made, request=replace(made.request, tools=[TOOL]))


def test_event_keeps_tools_and_calls() -> None:
    """The calls in OpenAI's shape, without their place in a stream, and what kinds they are."""
    got = event(with_tools(), answer(tool_calls=[CALLED], finish_reason="tool_calls"))
    wanted = {name: value for name, value in CALLED.items() if name != "index"}
    assert (got.tools, got.tool_calls, got.tool_call_kinds) == ([TOOL], [wanted], ("valid",))


@pytest.mark.parametrize("fields", [{"store_content": False}, {"store": False}], ids=str)
def test_kinds_are_kept_where_content_is_not(fields: dict[str, Any]) -> None:
    """Tools and calls are content, their kinds are not."""
    got = event(with_tools(**fields), answer(tool_calls=[CALLED], finish_reason="tool_calls"))
    assert (got.tools, got.tool_calls, got.tool_call_kinds) == (None, None, ("valid",))


def test_answer_without_a_call_is_counted_only_where_one_was_possible() -> None:
    """Not where the client forbade calls, and not where the answer did not end."""
    made = with_tools()
    assert event(made).tool_call_kinds == ("none",)
    assert event(made, answer(finish_reason="abort")).tool_call_kinds == ()
    assert event(replace(made, request=replace(made.request, tool_choice="none"))).tool_call_kinds == ()
    assert event(call()).tool_call_kinds == ()


def test_kinds_are_counted() -> None:
    """One a call, by kind."""
    metrics = Metrics()
    metrics.captured(event(with_tools(), answer(tool_calls=[CALLED, CALLED], finish_reason="tool_calls")))
    samples = [metrics.registry.get_sample_value("riacho_tool_calls_total", {"kind": k}) for k in ("valid", "repeated")]
    assert samples == [1, 1]
