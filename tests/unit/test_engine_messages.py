"""Messages on their way to a chat template."""

from typing import Any

import pytest

from app.engines.messages import for_template, free_tools


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"x": 1, "y": "\u00e9"}', {"x": 1, "y": "\u00e9"}),
        ('{"x":1}', {"x": 1}),
        ("", {}),
        ("{", "{"),
        ("[1]", "[1]"),
        ({"x": 1}, {"x": 1}),
        (3, 3),
    ],
)
def test_arguments_are_objects(text: Any, read: Any) -> None:
    """JSON text of an object becomes the object; what is none stays as it came."""
    assert for_template(call(text), knows_developer=False) == call(read)


def test_the_clients_message_is_left_alone() -> None:
    """The log keeps a message as the client sent it."""
    message = call('{"x": 1}')
    for_template(message, knows_developer=False)
    assert message == call('{"x": 1}')


@pytest.mark.parametrize(("knows", "role"), [(True, "developer"), (False, "system")])
def test_a_developer_speaks_as_the_system(knows: bool, role: str) -> None:
    """Unless the template knows developers; one that does not would leave the message out."""
    assert for_template({"role": "developer", "content": "x"}, knows_developer=knows)["role"] == role


def test_strict_is_taken_out() -> None:
    """And nothing else; what is no function tool is left to whoever checks it."""
    function = {"name": "f", "parameters": {"strict": {"type": "boolean"}}}
    tools = [{"type": "function", "function": function | {"strict": True}}, {"type": "function"}, {"function": 5}]
    assert free_tools(tools) == [{"type": "function", "function": function}, {"type": "function"}, {"function": 5}]
