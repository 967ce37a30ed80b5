"""Hermes tool calls in an answer's text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

import json
import re
import uuid
from typing import Any

from app.engines.detokenize import held_back

OPEN = "<tool_call>"
_OPENING = re.compile(rf"{OPEN}\s*")
_CLOSING = re.compile(r"\s*</tool_call>")
_JSON = json.JSONDecoder()
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


class ToolCallParser:
    """Passes an answer's text on as it comes, but holds everything from the first `<tool_call>` on until the end.

    White space is held too until something else follows, because a chat template writes its own before a call:
    a client that sends the answer back gets the tokens that were sampled.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """What the client may see now."""
        text = self._held + text
        keep = text.find(OPEN)
        if keep < 0:
            keep = len(text) - held_back(text, [OPEN])
        keep = len(text[:keep].rstrip())
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """The rest of the text and the calls, in order and in OpenAI's shape."""
        text, self._held = self._held, ""
        return parse(text)


def parse(text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Take the valid calls out of `text`, with the white space around them; all else stays text."""
    pieces: list[str] = []
    calls: list[dict[str, Any]] = []
    end = 0
    for opening in _OPENING.finditer(text):
        found = _call(text, opening.end())
        if found is None or opening.start() < end:  # the latter: spelt out inside an argument
            continue
        function, after = found
        call_id = f"call_{uuid.uuid4().hex}"
        calls.append({"index": len(calls), "id": call_id, "type": "function", "function": function})
        pieces.append(text[end : opening.start()].rstrip())
        end = after
    tail = text[end:]
    pieces.append(tail if tail.strip() or not calls else "")
    return "".join(pieces), tuple(calls)


def _call(text: str, at: int) -> tuple[dict[str, str], int] | None:
    """The function that is called at `at` and where the call ends, or None if it is malformed or unfinished."""
    try:
        call, end = _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    closing = _CLOSING.match(text, end)
    if closing is None or not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return None
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return None
    return {"name": name, "arguments": _spelling(text[at:end], call["arguments"])}, closing.end()


def _spelling(body: str, arguments: dict[str, Any]) -> str:
    """The JSON text of `arguments` inside `body`: written again it could have other spaces, so other tokens."""
    for found in _ARGUMENTS.finditer(body):
        try:
            value, end = _JSON.raw_decode(body, found.end())
        except ValueError:
            continue
        if value == arguments:
            return body[found.end() : end]
    return json.dumps(arguments, ensure_ascii=False)
