"""Hermes tool calls in a stream: the same result however the text was cut."""

import json
from typing import Any

import pytest

from app.engines.tool_calls import ToolCallParser

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":  "37*12"}}\n</tool_call>'
OTHER = '<tool_call>{"name":"search","arguments":{"q":"é </tool_call> <tool_call> {"}}</tool_call>'
CALCULATOR = ("calculator", '{"expression":  "37*12"}')
SEARCH = ("search", '{"q":"é </tool_call> <tool_call> {"}')

CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("plain text with 1 < 2", "plain text with 1 < 2", []),
    ("ends in white space \n", "ends in white space \n", []),
    (CALL, "", [CALCULATOR]),
    (f"Let me see.\n{CALL}", "Let me see.", [CALCULATOR]),
    (f"{CALL}\n{OTHER}\n", "", [CALCULATOR, SEARCH]),
    (f"{CALL} and then {OTHER} done", " and then done", [CALCULATOR, SEARCH]),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    (f"<tool_call>not json</tool_call>\n{CALL}", "<tool_call>not json</tool_call>", [CALCULATOR]),
    (f"<tool_call>never closed {CALL}", "<tool_call>never closed", [CALCULATOR]),
    (CALL.removesuffix("</tool_call>"), CALL.removesuffix("</tool_call>"), []),
    ("a <tool_ca", "a <tool_ca", []),
    ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ('<tool_call>["f", {}]</tool_call>', '<tool_call>["f", {}]</tool_call>', []),
    ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
]


def run(pieces: list[str]) -> tuple[str, list[tuple[str, str]], tuple[dict[str, Any], ...]]:
    parser = ToolCallParser()
    shown = "".join([parser.feed(piece) for piece in pieces])
    rest, calls = parser.finish()
    return shown + rest, [(call["function"]["name"], call["function"]["arguments"]) for call in calls], calls


@pytest.mark.parametrize(("text", "content", "functions"), CASES)
def test_calls_and_text_do_not_depend_on_where_the_text_is_split(
    text: str, content: str, functions: list[tuple[str, str]]
) -> None:
    for at in range(min(len(text), 200) + 1):
        assert run([text[:at], text[at:]])[:2] == (content, functions)
    if len(text) < 1000:
        assert run(list(text))[:2] == (content, functions)


def test_calls_have_the_shape_of_openai() -> None:
    _, _, (first, second) = run([CALL + OTHER])
    assert (first["index"], second["index"]) == (0, 1)
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    assert json.loads(first["function"]["arguments"]) == {"expression": "37*12"}


def test_text_before_a_call_is_shown_at_once_and_a_call_never() -> None:
    parser = ToolCallParser()
    assert parser.feed("Let me ") == "Let me"
    assert parser.feed("see.\n") == " see."
    assert parser.feed("<tool") == ""
    assert parser.feed("s> are fun") == "\n<tools> are fun"
    assert parser.feed(" <tool_call>{") == ""
    assert parser.feed("never a call") == ""
    assert parser.finish() == (" <tool_call>{never a call", ())


def test_arguments_are_found_among_others_of_that_name() -> None:
    """The spelling is that of the call's own arguments, not of a field with the same name inside them."""
    body = '{"note": {"arguments": {"a": 1}}, "name": "f", "arguments": {"arguments":  {"b": 2}}}'
    _, functions, _ = run([f"<tool_call>{body}</tool_call>"])
    assert functions == [("f", '{"arguments":  {"b": 2}}')]
