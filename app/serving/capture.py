"""Capture: every answer becomes a durable event before its last byte leaves."""

import asyncio
import logging
import math
from typing import Literal

from app.events.log import EventRefused, EventSink, LogUnavailable
from app.events.schema import CompletionEvent, ToolCallKind, Usage
from app.security.receipts import Receipts
from app.serving.call import Answer, ChatCall, without_place
from app.serving.tool_kinds import tool_call_kinds
from app.serving.trainability import reason_not_trainable
from app.telemetry.metrics import Metrics

OnFailure = Literal["fail_closed", "fail_open"]

log = logging.getLogger(__name__)


def completion_event(call: ChatCall, choice: int, answer: Answer, version: int, completion_id: str) -> CompletionEvent:
    """What the log keeps of one choice.

    Tokens that are incomplete, or whose logprobs are, stay out. Without `store` all tokens do, since they are the
    content; with a key that keeps no content only the text does, since training needs the tokens.
    """
    reason = _reason(call, answer)
    whole = call.store and answer.complete
    readable = call.store and call.key.store_content
    return CompletionEvent(
        event_id=completion_id,
        policy=call.policy,
        session_id=call.receipt(choice).session_id,
        at=call.at,
        completion_id=completion_id,
        version=version,
        prompt_ids=answer.prompt_ids if call.store else (),
        completion_ids=tuple(answer.token_ids) if whole else (),
        logprobs=tuple(answer.logprobs) if whole else (),
        sampling=call.request.sampling,
        finish_reason=answer.finish_reason or "abort",
        trainable=reason is None,
        not_trainable_reason=reason,
        usage=Usage(prompt_tokens=len(answer.prompt_ids), completion_tokens=len(answer.token_ids)),
        key_id=call.key.id,
        trace_id=call.trace_id,
        messages=call.request.messages if readable else None,
        tools=call.request.tools if readable else None,
        output=answer.text if readable else None,
        tool_calls=[without_place(part) for part in answer.tool_calls] or None if readable else None,
        tool_call_kinds=_kinds(call, answer),
    )


def _kinds(call: ChatCall, answer: Answer) -> tuple[ToolCallKind, ...]:
    """None of an answer that did not end: what it would have called is not known."""
    if answer.finish_reason in (None, "abort"):
        return ()
    request = call.request
    offered = None if request.tool_choice == "none" else request.tools
    return tool_call_kinds(answer.tool_calls, answer.text, offered, request.messages)


def _reason(call: ChatCall, answer: Answer) -> str | None:
    if not call.store:
        return "the client sent store = false"
    if answer.finish_reason in (None, "abort"):
        return "the answer did not end"
    if not answer.prompt_ids or not answer.token_ids:
        return "the token ids are missing"
    if answer.sampled not in (None, len(answer.token_ids)):
        return "some token ids are missing"
    if not answer.complete or not all(map(math.isfinite, answer.logprobs)):
        return "a logprob is missing"
    return reason_not_trainable(call.request.sampling)


class Capture:
    """Appends completion events.

    Args:
        on_failure: what happens to an answer that cannot be recorded: `fail_closed` gives the client an error,
            `fail_open` lets the answer go and counts the loss.
    """

    def __init__(self, events: EventSink, receipts: Receipts, metrics: Metrics, on_failure: OnFailure) -> None:
        self._log = events
        self._receipts = receipts
        self._metrics = metrics
        self._on_failure = on_failure
        self._under_way: set[asyncio.Task[None]] = set()

    async def record(self, call: ChatCall, choice: int, answer: Answer, version: int) -> None:
        """Append one choice's event, to the end even if the caller is cancelled meanwhile.

        Where that fails and the setting is fail_closed, raises LogUnavailable or EventRefused.
        """
        await asyncio.shield(self._start(call, choice, answer, version))

    def record_abort(self, call: ChatCall, choice: int, answer: Answer, version: int) -> None:
        """Record an answer that did not end, without holding up whoever is being cancelled."""
        answer.finish_reason = "abort"
        self._start(call, choice, answer, version)

    async def settle(self) -> None:
        """Wait for the records whose callers have left."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _start(self, call: ChatCall, choice: int, answer: Answer, version: int) -> asyncio.Task[None]:
        task = asyncio.create_task(self._append(call, choice, answer, version))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _append(self, call: ChatCall, choice: int, answer: Answer, version: int) -> None:
        completion_id = self._receipts.sign(call.receipt(choice))
        event = completion_event(call, choice, answer, version, completion_id)
        try:
            await self._log.append(event)
        except (LogUnavailable, EventRefused) as error:
            self._metrics.lost_events.inc()
            if isinstance(error, EventRefused):
                self._metrics.refused_events.inc()
            log.error("a completion was not recorded: %s", error)
            if self._on_failure == "fail_closed":
                raise
        else:
            self._metrics.captured(event)
