"""What kind each tool call of an answer is: pure, and without content, so that every completion event can carry it.

An agent's policy may drift to the call that is punished least, such as one without arguments; the counts show it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema_rs

from app.engines.tool_calls import OPEN
from app.events.schema import ToolCallKind

Call = Mapping[str, Any]


def tool_call_kinds(
    calls: Sequence[Call], text: str, offered: Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> tuple[ToolCallKind, ...]:
    """One kind a call of the answer, in order, then `malformed` for each call that was left in its text.

    `none` alone where tools were offered and the answer calls none; nothing where none were offered and none called.

    Args:
        calls: the answer's calls, and `offered` the request's tools, both in OpenAI's shape.
        messages: the conversation before the answer, in which a call is looked for that this one repeats.
    """
    if not calls and not offered:
        return ()
    schemas = {tool.get("name"): tool.get("parameters") for tool in _functions(offered or ())}
    seen = {_spelling(function) for message in messages for function in _functions(message.get("tool_calls") or ())}
    kinds: list[ToolCallKind] = []
    for function in _functions(calls):
        kinds.append(_kind(function, schemas, seen))
        seen.add(_spelling(function))
    kinds += ["malformed"] * text.count(OPEN)  # the parser leaves a call in the text where there is no JSON inside
    return tuple(kinds) or ("none",)


def _kind(function: Call, schemas: Mapping[Any, Any], seen: set[str]) -> ToolCallKind:
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (ValueError, RecursionError):
        return "malformed"
    if function.get("name") not in schemas:
        return "unknown_tool"
    schema = schemas[function.get("name")]
    if arguments == {} and isinstance(schema, dict) and schema.get("properties"):
        return "empty"
    if not _matches(arguments, schema):
        return "invalid_arguments"
    return "repeated" if _spelling(function) in seen else "valid"


def _matches(arguments: Any, schema: Any) -> bool:
    """Whether `arguments` are an object that the schema allows; a schema that is none, or is not all here, allows any.

    Its patterns are matched in linear time: a client's schema must not hold up the others' answers.
    """
    if not isinstance(arguments, dict):
        return False
    if not isinstance(schema, dict):
        return True
    try:
        validator = jsonschema_rs.validator_for(schema, offline=True, pattern_options=jsonschema_rs.RegexOptions())
    except ValueError:
        return True
    return validator.is_valid(arguments)


def _functions(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The `function` of tools or of calls; others, such as a provider's own tools, have none."""
    found = (item.get("function") for item in items)
    return [function for function in found if isinstance(function, Mapping)]


def _spelling(function: Call) -> str:
    """A call's name and arguments, the same for all spellings of the same JSON."""
    name, arguments = function.get("name"), function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps([name, parsed], sort_keys=True)
    except (ValueError, RecursionError):
        return f"{name} {arguments}"
