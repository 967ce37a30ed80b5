"""A session as a judge reads it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from learner.rewards.view import CannotScore, SessionView, TurnView

Message = Mapping[str, Any]


def conversations(session: SessionView) -> list[list[Message]]:
    """Every message once, in order; a turn that does not continue the one before it starts another conversation.

    The answers are those that were sampled, marked `"judged": true`, not what a client made of them in its history.
    Raises CannotScore for a session without turns or whose content is not kept.
    """
    if not session.turns:
        raise CannotScore("the session has no turns")
    found: list[list[Message]] = []
    before: Sequence[Message] | None = None
    for turn in session.turns:
        if turn.messages is None:
            raise CannotScore("the session's messages are not kept")
        if before is not None and len(turn.messages) > len(before) and list(turn.messages[: len(before)]) == [*before]:
            found[-1] += _without_echo(turn.messages[len(before) :])
        else:
            found.append(list(turn.messages))
        found[-1].append(_answer(turn))
        before = turn.messages
    return found


def written(session: SessionView) -> str:
    """The conversations as JSON on one line without any `<`, so that no text in it can close or open a tag.

    That holds for the tags around it and for the control tokens of a judge's chat template.
    """
    text = json.dumps(conversations(session), ensure_ascii=False).replace("<", "\\u003c")
    return text.encode(errors="replace").decode()  # half of a surrogate pair cannot be sent


def _without_echo(messages: Sequence[Message]) -> Sequence[Message]:
    """Leaves out the answer before, as the client sent it back."""
    return messages[1:] if messages[0].get("role") == "assistant" else messages


def _answer(turn: TurnView) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": turn.output, "judged": True}
    if turn.tool_calls:
        message["tool_calls"] = list(turn.tool_calls)
    return message
