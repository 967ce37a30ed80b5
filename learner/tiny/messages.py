"""The shape of a training dialogue: chat-completion messages, and the tools offered in it."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Dialogue:
    """Messages in order; `kind` names the part of the grammar that made them."""

    kind: str
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
