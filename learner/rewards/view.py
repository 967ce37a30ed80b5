"""What a reward function sees and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class CannotScore(Exception):
    """The session cannot be scored now; the message is the reason, for people, without the session's content."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """One answer of the model and what it answered.

    `messages`, `tools`, `output` and `tool_calls` (OpenAI's shapes) are None where content is not kept;
    `tool_call_kinds` is always there, one for each call, and `("none",)` where tools were offered and none was called.
    """

    completion_id: str
    version: int
    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    output: str | None
    tool_calls: Sequence[Mapping[str, Any]] | None
    tool_call_kinds: tuple[str, ...]
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class SessionView:
    """A finished session: its turns in the order in which they were answered."""

    session_id: str
    turns: tuple[TurnView, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards: one on the session, and by completion id on its turns. What is absent has no reward, not a 0."""

    session: float | None = None
    turns: Mapping[str, float] = field(default_factory=dict)


RewardFunction = Callable[[SessionView], Scores]
Factory = Callable[[Mapping[str, Any]], RewardFunction]
