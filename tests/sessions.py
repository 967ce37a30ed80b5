"""Finished sessions as reward functions see them, for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from learner.rewards.view import SessionView, TurnView


def turn(
    number: int = 0,
    output: str | None = "yes",
    *,
    messages: Sequence[Mapping[str, Any]] | None = ({"role": "user", "content": "Well?"},),
    tool_calls: Sequence[Mapping[str, Any]] | None = None,
    kinds: tuple[str, ...] = (),
    tokens: int = 1,
) -> TurnView:
    """One turn, with the completion id `c<number>`."""
    return TurnView(f"c{number}", 1, messages, None, output, tool_calls, kinds, "stop", tokens)


def session(*turns: TurnView) -> SessionView:
    return SessionView("s", turns)


def call(name: str, arguments: str = "{}", call_id: str = "call_1") -> dict[str, Any]:
    """A tool call in OpenAI's shape."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
