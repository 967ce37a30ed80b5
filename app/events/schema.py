"""The events, the contract between the app and the learner.

Every event names its policy and its session. The key on the log is the session, so that the events of a
session stay in order on one partition.
"""

import math
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from app.events.arrays import Logprobs, TokenIds

INT32_MAX = 2**31 - 1
DEFAULT_SIGNAL = "reward"
GREEDY_BELOW = 1e-5  # a smaller temperature overflows float32, and engines take the likeliest token


class BadEvent(ValueError):
    """A record that is no event this code can apply; the message is the dead letter's reason."""


def _storable(text: str) -> str:
    if "\0" in text:
        raise ValueError("has the character U+0000, which the registry's tables cannot hold")
    return text


# What the registry's tables can hold, so that no event stops whoever writes them.
StoredText = Annotated[str, AfterValidator(_storable)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Signal = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]  # which of a policy's rewards a number is
Reward = Annotated[float, Field(allow_inf_nan=False, strict=True)]
ToolCallKind = Literal["valid", "repeated", "empty", "invalid_arguments", "unknown_tool", "malformed", "none"]


class EventBase(BaseModel):
    """What every event carries.

    `event_id` is what makes a redelivered event count once. `at` is event time: the learner has no other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    event_id: str = Field(default_factory=lambda: uuid.uuid4().hex, min_length=1, max_length=512)
    schema_version: Literal[1] = 1
    policy: str = Field(min_length=1, max_length=64)
    session_id: StoredText = Field(min_length=1, max_length=128)
    at: datetime

    @field_validator("at")
    @classmethod
    def _aware(cls, at: datetime) -> datetime:
        if at.tzinfo is None:
            raise ValueError("at needs a UTC offset")
        try:
            return at.astimezone(UTC)
        except OverflowError as error:
            raise ValueError(f"at is outside the calendar in UTC: {error}") from error


class Sampling(BaseModel):
    """The sampling parameters as they took effect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: bool = False
    structured: bool = False
    seed: int | None = None
    max_tokens: int
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


class Usage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: Count
    completion_tokens: Count


class CompletionEvent(EventBase):
    """One sampled choice: exactly what the engine read and sampled, and under which version.

    `messages`, `tools`, `output` and `tool_calls` are for people and reward functions, and absent where content must
    not be kept. `tool_call_kinds` has one kind a call, or `none` alone where tools were offered and none was called.
    """

    type: Literal["completion"] = "completion"
    completion_id: StoredText = Field(min_length=1, max_length=300)
    version: Count = Field(description="the adapter version that sampled; 0 is the base")
    prompt_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Logprobs
    sampling: Sampling
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    trainable: bool
    not_trainable_reason: StoredText | None = None
    usage: Usage
    key_id: StoredText = Field(max_length=64)
    trace_id: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    output: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_kinds: tuple[ToolCallKind, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.completion_ids)} completion ids but {len(self.logprobs)} logprobs; "
                "there must be one logprob per sampled token"
            )
        if self.trainable and not all(math.isfinite(p) for p in self.logprobs):
            raise ValueError("a trainable completion has a logprob that is not finite")
        temperature = self.sampling.temperature
        if self.trainable and not GREEDY_BELOW <= temperature < math.inf:
            raise ValueError(f"a trainable completion has temperature {temperature}; it must be above 0 and finite")
        if self.trainable == (self.not_trainable_reason is not None):
            raise ValueError("not_trainable_reason goes with trainable = false, and only with it")
        return self


class FeedbackEvent(EventBase):
    """A reward on one completion (`completion_id`) or on the whole session."""

    type: Literal["feedback"] = "feedback"
    completion_id: str | None = None
    signal: Signal = DEFAULT_SIGNAL
    reward: Reward
    final: bool = True
    key_id: str
    comment: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def rewards(self) -> dict[str | None, float]:
        """By completion id, None for the session as a whole."""
        return {self.completion_id: self.reward}


class SessionClosedEvent(EventBase):
    """The client says that the session has ended; its rewards are already there."""

    type: Literal["session_closed"] = "session_closed"


class ScoreEvent(EventBase):
    """What a signal's scorer says of a complete session: a reward on it, rewards on turns, or that there is none.

    `failure` is the reason, for people, why the scorer could not score it. The first score of a session and signal
    counts, however many come.
    """

    type: Literal["score"] = "score"
    signal: Signal
    session: Reward | None = None
    turns: dict[str, Reward] = {}
    failure: str | None = None

    @property
    def rewards(self) -> dict[str | None, float]:
        """By completion id, None for the session as a whole."""
        rewards: dict[str | None, float] = {id: reward for id, reward in self.turns.items()}
        return rewards if self.session is None else rewards | {None: self.session}

    @model_validator(mode="after")
    def _one_outcome(self) -> Self:
        if self.failure is not None and self.rewards:
            raise ValueError("failure goes with no reward")
        return self


class RollbackEvent(EventBase):
    """The learner restores version `to` (0 = base) and goes on from there in `epoch`."""

    type: Literal["rollback"] = "rollback"
    to: Count
    epoch: int = Field(ge=1, le=INT32_MAX)
    reason: str


class ForgetEvent(EventBase):
    """Drop what waits for this session: it must not be trained on."""

    type: Literal["forget"] = "forget"


Event = Annotated[
    CompletionEvent | FeedbackEvent | SessionClosedEvent | ScoreEvent | RollbackEvent | ForgetEvent,
    Field(discriminator="type"),
]
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def encode(event: Event) -> bytes:
    """The event as it goes on the log: UTF-8 JSON, without absent fields."""
    return event.model_dump_json(exclude_none=True).encode()


def decode(payload: bytes) -> Event:
    """The event in a log record; raises BadEvent with a reason that names what is wrong."""
    try:
        return _ADAPTER.validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "event"
        raise BadEvent(f"{where}: {first['msg']}") from error
