"""The events: exact arrays, and a reason that names what is wrong with a record."""

import base64
import json
import struct
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.events.arrays import pack, unpack
from app.events.log import Position
from app.events.schema import (
    BadEvent,
    CompletionEvent,
    Event,
    EventBase,
    FeedbackEvent,
    RollbackEvent,
    decode,
    encode,
)
from tests.builders import closed, completion, feedback, forget

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
ROLLBACK = RollbackEvent(
    event_id="r", policy="riacho", session_id="rollback", at=datetime(2026, 1, 1, tzinfo=UTC), to=3, epoch=2, reason="?"
)
EVERY_TYPE: list[Event] = [completion(), feedback(), closed(), forget(), ROLLBACK]


def _record(event: Event, **changes: Any) -> bytes:
    return json.dumps({**json.loads(encode(event)), **changes}).encode()


@given(st.lists(INT32, max_size=30))
def test_token_ids_are_little_endian_int32_in_base64(ids: list[int]) -> None:
    """The text is what struct makes of the numbers, and gives them back."""
    text = pack("i", ids)
    assert base64.b64decode(text) == struct.pack(f"<{len(ids)}i", *ids)
    assert list(unpack("i", text)) == ids


@given(st.lists(FLOAT32, max_size=30))
def test_logprobs_keep_every_bit_of_float32(values: list[float]) -> None:
    """Subnormals, infinities and negative zero included."""
    bits = np.array(values, dtype="<f4").tobytes()
    text = pack("f", values)
    assert base64.b64decode(text) == bits
    assert np.array(unpack("f", text), dtype="<f4").tobytes() == bits


@pytest.mark.parametrize("text", ["AAA", "AAAA", "!!!!", "AAAAAA==\n", "ü"])
def test_text_that_is_not_whole_items_is_refused(text: str) -> None:
    """Broken base64, or bytes that are not a multiple of four."""
    with pytest.raises(ValueError, match=r"base64|32-bit|ASCII"):
        unpack("i", text)


@given(
    tokens=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=20),
    prompt=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    output=st.none() | st.text(),
    seconds=st.integers(0, 10**6),
)
def test_completion_equals_itself_after_the_log(
    tokens: list[tuple[int, float]], prompt: list[int], output: str | None, seconds: int
) -> None:
    """decode(encode(event)) is the event, with float32 logprobs exact."""
    event = completion(
        seconds=seconds,
        prompt_ids=tuple(prompt),
        completion_ids=[token for token, _ in tokens],
        logprobs=tuple(logprob for _, logprob in tokens),
        output=output,
    )
    again = decode(encode(event))
    assert again == event
    assert isinstance(again, CompletionEvent)
    assert np.array(again.logprobs, "<f4").tobytes() == np.array([p for _, p in tokens], "<f4").tobytes()


def test_logprobs_are_rounded_to_float32_when_the_event_is_made() -> None:
    """A float64 from an engine is rounded once, so that the event in memory is the event on the log."""
    event = completion(completion_ids=(3,), logprobs=(-0.1,))
    assert event.logprobs == (float(np.float32(-0.1)),)


@pytest.mark.parametrize("event", EVERY_TYPE, ids=lambda event: event.type)
def test_every_type_round_trips(event: Event) -> None:
    """Each event comes back as its own class with its own content."""
    again = decode(encode(event))
    assert type(again) is type(event)
    assert again == event


def test_absent_content_is_not_on_the_log() -> None:
    """A completion whose content must not be kept has no field for it."""
    record = json.loads(encode(completion()))
    assert not {"messages", "output", "trace_id", "not_trainable_reason"} & record.keys()


def test_arrays_take_about_eleven_bytes_a_token() -> None:
    """An id and its logprob cost 2 * 4 bytes * 4/3, so that a long episode fits through a broker."""
    short, long = (
        len(encode(completion(completion_ids=range(n), usage={"prompt_tokens": 2, "completion_tokens": 0})))
        for n in (0, 3000)
    )
    assert (long - short) / 3000 == pytest.approx(32 / 3, abs=0.01)


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (_record(completion(), logprobs=pack("f", [-1.0])), "2 completion ids but 1 logprobs"),
        (_record(completion(), completion_ids=pack("i", [1, 2, 3])), "3 completion ids but 2 logprobs"),
        (_record(completion(), logprobs=pack("f", [-1.0, float("nan")])), "logprob that is not finite"),
        (_record(completion(), logprobs=pack("f", [-1.0, float("-inf")])), "logprob that is not finite"),
        (_record(completion(), logprobs="AAA"), "completion.logprobs"),
        (_record(completion(), prompt_ids="AAAA"), "completion.prompt_ids"),
        (_record(completion(), trainable=False), "not_trainable_reason"),
        (_record(completion(), not_trainable_reason="top_p"), "not_trainable_reason"),
        (_record(completion(), finish_reason="because"), "completion.finish_reason"),
        (_record(completion(), version=-1), "completion.version"),
        (_record(feedback(), type="praise"), "type"),
        (_record(feedback(), schema_version=2), "feedback.schema_version"),
        (_record(feedback(), reward=True), "feedback.reward"),
        (_record(feedback(), reward="1"), "feedback.reward"),
        (_record(feedback(), reward=float("nan")), "feedback.reward"),
        (_record(feedback(), reward=float("inf")), "feedback.reward"),
        (_record(feedback(), session_id=""), "feedback.session_id"),
        (_record(feedback(), event_id=""), "feedback.event_id"),
        (_record(feedback(), at="2026-01-01T00:00:00"), "feedback.at"),
        (_record(feedback(), mood="good"), "feedback.mood"),
        (b"{", "event"),
        (b"[]", "event"),
        (b"\xff", "event"),
        (b"", "event"),
    ],
)
def test_bad_record_is_refused_with_the_field_named(record: bytes, named: str) -> None:
    """The dead letter's reason says which field is wrong."""
    with pytest.raises(BadEvent) as caught:
        decode(record)
    assert named in str(caught.value)


@pytest.mark.parametrize("field", ["type", "policy", "session_id", "at", "reward", "key_id"])
def test_missing_field_is_named(field: str) -> None:
    """A record without a field that it needs says which."""
    record = json.loads(encode(feedback()))
    del record[field]
    with pytest.raises(BadEvent, match=rf"\b{field}\b"):
        decode(json.dumps(record).encode())


@pytest.mark.parametrize("logprobs", [5, None, [None, None], [[-1.0], [-1.0]], {"a": 1}, ["x", "y"]])
def test_logprobs_of_another_type_are_a_bad_event(logprobs: Any) -> None:
    """A producer's wrong type is a dead letter, not a crash of the learner at the same record for ever."""
    with pytest.raises(BadEvent, match="logprobs"):
        decode(_record(completion(), logprobs=logprobs))


@pytest.mark.parametrize(
    "change",
    [
        {"session_id": "s\0"},
        {"completion_id": "c" * 301},
        {"completion_id": "c\0"},
        {"key_id": "k" * 65},
        {"key_id": "k\0"},
        {"version": 2**31},
        {"usage": {"prompt_tokens": 2**31, "completion_tokens": 0}},
        {"usage": {"prompt_tokens": 0, "completion_tokens": -1}},
        {"trainable": False, "not_trainable_reason": "\0"},
    ],
)
def test_what_no_table_can_hold_is_a_bad_event(change: dict[str, Any]) -> None:
    """Whoever reads it gives the reason with the field, before the database refuses it."""
    payload = json.loads(encode(completion())) | change
    with pytest.raises(BadEvent, match=list(change)[-1]):
        decode(json.dumps(payload).encode())


def test_content_may_have_any_character() -> None:
    """Text of people and models is kept as it is."""
    event = completion(messages=[{"role": "user", "content": "a\0b"}], output="\0")
    assert decode(encode(event)) == event


def test_time_outside_the_calendar_is_a_bad_event() -> None:
    """The last hour of year 9999 west of Greenwich has no UTC time, and is a dead letter, not a crash."""
    with pytest.raises(BadEvent, match=r"feedback\.at"):
        decode(_record(feedback(), at="9999-12-31T23:59:59-01:00"))


@settings(max_examples=300)
@given(event=st.sampled_from(EVERY_TYPE), data=st.data())
def test_decode_gives_an_event_or_a_reason(event: Event, data: st.DataObject) -> None:
    """Whatever JSON stands in one field, the outcome is an event or BadEvent."""
    field = data.draw(st.sampled_from(sorted(json.loads(encode(event)))))
    record = _record(event, **{field: data.draw(JSON)})
    outcome: Any
    try:
        outcome = decode(record)
    except BadEvent as error:
        outcome = str(error)
    assert isinstance(outcome, EventBase) or outcome


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_trainable_completion_has_a_temperature_to_divide_by(temperature: float) -> None:
    """Greedy or broken sampling cannot be trained on: logits / 0 would be NaN weights for ever after."""
    record = json.loads(encode(completion()))
    record["sampling"]["temperature"] = temperature
    with pytest.raises(BadEvent, match="temperature"):
        decode(json.dumps(record).encode())


def test_reward_as_a_whole_number_is_a_reward() -> None:
    """1 in JSON is 1.0; only a bool is not a number."""
    event = decode(_record(feedback(), reward=1))
    assert isinstance(event, FeedbackEvent)
    assert event.reward == 1.0


def test_untrainable_completion_may_have_infinite_logprobs() -> None:
    """What is served with a grammar has -inf logprobs; it is kept, with the reason."""
    event = completion(logprobs=(-1.0, float("-inf")), trainable=False, not_trainable_reason="structured")
    again = decode(encode(event))
    assert isinstance(again, CompletionEvent)
    assert again.logprobs == (-1.0, float("-inf"))


def test_time_is_kept_in_utc() -> None:
    """An event made in another zone is the same moment in UTC."""
    local = datetime(2026, 1, 1, 3, tzinfo=timezone(timedelta(hours=3)))
    event = FeedbackEvent(policy="riacho", session_id="s", at=local, reward=1.0, key_id="k")
    assert event.at == datetime(2026, 1, 1, tzinfo=UTC)
    assert event.at.utcoffset() == timedelta(0)


def test_event_ids_are_made_unique() -> None:
    """Two events made without an id are two events."""
    made = [FeedbackEvent(policy="p", session_id="s", at=datetime.now(UTC), reward=1.0, key_id="k") for _ in range(2)]
    assert made[0].event_id != made[1].event_id


def test_events_do_not_change_after_they_are_made() -> None:
    """An event is a record; a changed one would no longer be what is on the log."""
    with pytest.raises(ValidationError):
        feedback().reward = 0.0


@given(st.integers(0, 1023), st.integers(0, 2**62))
def test_position_round_trips_as_text(partition: int, offset: int) -> None:
    """A checkpoint keeps positions as text."""
    assert Position.parse(str(Position(partition, offset))) == Position(partition, offset)
