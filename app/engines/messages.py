"""Messages and tools as every engine takes them: text only, and nothing that would constrain the sampling."""

import json
from collections.abc import Sequence
from typing import Any

from app.errors import InvalidRequest


def joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as one string; raises InvalidRequest for parts that are not text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    foreign = [part.get("type") for part in content if part.get("type") != "text"]
    if foreign:
        raise InvalidRequest(
            f"The model reads text only, but a message has a part of type {foreign[0]}.", param="messages"
        )
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("A message's content has a text part without a text.", param="messages")
    return {**message, "content": "".join(texts)}


def for_template(message: dict[str, Any], *, knows_developer: bool) -> dict[str, Any]:
    """A message as chat templates know it, and as vLLM gives it to them.

    Content is one string, arguments of tool calls are objects and not their JSON text, which a template would quote
    once more, and a developer's word is the system's where the template knows no developer.
    """
    message = joined_parts(message)
    message = {**message, "content": message.get("content") or ""}
    if message.get("role") == "developer" and not knows_developer:
        message["role"] = "system"
    if message.get("tool_calls"):
        message["tool_calls"] = [_parsed_arguments(call) for call in message["tool_calls"]]
    return message


def _parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object; text that is none stays as it is."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def free_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools without `strict`.

    Some agent frameworks set it on every tool. An engine that obeyed would sample calls from a grammar, and what is
    sampled so cannot be trained on; here a policy learns to keep to the schema.
    """
    return [
        tool | {"function": {key: value for key, value in tool["function"].items() if key != "strict"}}
        if isinstance(tool.get("function"), dict)
        else tool
        for tool in tools
    ]
