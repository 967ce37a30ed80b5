"""Tool-call kinds: what an answer's calls are worth, without their content."""

import json
from typing import Any

import pytest

from app.serving.tool_kinds import tool_call_kinds

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "find", "parameters": {"properties": {"text": {"type": "string"}}}}},
]


def call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": text}}


def kinds(*calls: dict[str, Any], text: str = "", messages: Any = (), tools: Any = TOOLS) -> tuple[str, ...]:
    return tool_call_kinds(calls, text, tools, messages)


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("add", {"a": 1, "b": 2}, "valid"),
        ("now", {}, "valid"),
        ("now", {"zone": "UTC"}, "valid"),
        ("find", {"text": "x"}, "valid"),
        ("find", {}, "empty"),
        ("add", {}, "empty"),
        ("add", {"a": 1}, "invalid_arguments"),
        ("add", {"a": 1, "b": "2"}, "invalid_arguments"),
        ("add", {"a": 1, "b": 2, "c": 3}, "invalid_arguments"),
        ("now", [1], "invalid_arguments"),
        ("subtract", {"a": 1, "b": 2}, "unknown_tool"),
        ("add", '{"a": 1, "b"', "malformed"),
        ("add", "", "malformed"),
        ("add", "[" * 100_000, "malformed"),
    ],
)
def test_kind_of_one_call(name: str, arguments: Any, kind: str) -> None:
    """By its JSON, its name, and its tool's schema."""
    assert kinds(call(name, arguments)) == (kind,)


def test_each_call_of_an_answer_has_a_kind() -> None:
    """Parallel calls are judged one by one, in order."""
    made = [call("add", {"a": 1, "b": 2}), call("nothing", {}), call("add", {})]
    assert kinds(*made) == ("valid", "unknown_tool", "empty")


def test_call_that_was_made_before_is_repeated() -> None:
    """Earlier in the conversation or in the same answer, whatever the order and spacing of its arguments."""
    earlier = call("add", '{"b":2,"a":1}')
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [earlier]}]
    assert kinds(call("add", {"a": 1, "b": 2}), messages=messages) == ("repeated",)
    assert kinds(call("add", {"a": 1, "b": 2}), call("add", {"a": 1, "b": 2})) == ("valid", "repeated")
    assert kinds(call("add", {"a": 1, "b": 3}), messages=messages) == ("valid",)


def test_answer_that_calls_nothing() -> None:
    """It counts where tools were offered, and is nothing where none were."""
    assert kinds(text="Hello.") == ("none",)
    assert kinds(text="Hello.", tools=None) == ()
    assert kinds(text="Hello.", tools=[]) == ()


def test_call_that_the_parser_left_in_the_text_is_malformed() -> None:
    """No engine gives it as a call, yet the model meant one."""
    assert kinds(text='<tool_call>{"name": "add", </tool_call>') == ("malformed",)
    assert kinds(call("now", {}), text="<tool_call>add") == ("valid", "malformed")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "#/nowhere"},
        {"properties": {"a": {"pattern": "("}}},
        "text",
        ["list"],
        True,
    ],
    ids=str,
)
def test_schema_that_cannot_be_used_allows_everything(schema: Any) -> None:
    """A client's mistake in a schema, or a reference to elsewhere, does not make the model's call a bad one."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    assert kinds(call("add", {"a": "x"}), tools=tools) == ("valid",)


def test_pattern_that_backtracks_for_ever_ends() -> None:
    """A client's pattern and the model's answer together must not hold up the service."""
    schema = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    assert kinds(call("add", {"a": "a" * 5000 + "!"}), tools=tools) == ("invalid_arguments",)


@pytest.mark.parametrize("other", [{"type": "web_search"}, {"type": "function", "function": "add"}], ids=str)
def test_tools_without_a_function_are_passed_over(other: dict[str, Any]) -> None:
    """A provider's own kinds of tools have no name to call here."""
    assert kinds(call("add", {"a": 1, "b": 2}), tools=[other, *TOOLS]) == ("valid",)
