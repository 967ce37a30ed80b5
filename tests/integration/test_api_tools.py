"""Tools: they reach the chat template, calls come back in OpenAI's shape, and the loop's history is taken."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from learner.tiny.tool_dialogues import CALCULATOR
from tests.service import MODEL, POLICY, Service, local_only, service_fixture

service = service_fixture()

ASK: dict[str, Any] = {"role": "user", "content": "What is 12 + 30?"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "calculator", "arguments": '{"expression": "12 + 30"}'},
        }
    ],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "42"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def template_ids(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
    """What the model's own chat template makes of a conversation."""
    plain = [message | {"content": message["content"] or ""} for message in messages]
    encoded = tokenizer.apply_chat_template(
        plain, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    ids: list[int] = encoded["input_ids"]
    return ids


def prompt_of(service: Service, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    answer = service.ask(messages=messages, max_tokens=4, **fields)
    ids = list(service.recorded(answer["id"]).prompt_ids)
    assert len(ids) == answer["usage"]["prompt_tokens"]
    return ids


def test_prompt_is_the_templates(service: Service, tokenizer: Any) -> None:
    """Without tools the model reads exactly what its chat template writes."""
    assert prompt_of(service, [ASK]) == template_ids(tokenizer, [ASK], None)


def test_tools_reach_the_prompt(service: Service, tokenizer: Any) -> None:
    """With tools the prompt is the template's with these tools, and it is longer."""
    with_tools = prompt_of(service, [ASK], tools=[CALCULATOR])
    assert with_tools == template_ids(tokenizer, [ASK], [CALCULATOR])
    assert len(with_tools) > len(prompt_of(service, [ASK])) + 20


def test_tool_choice_none_hides_the_tools(service: Service) -> None:
    """tool_choice = "none": the model is not told of tools that it may not call."""
    assert prompt_of(service, [ASK], tools=[CALCULATOR], tool_choice="none") == prompt_of(service, [ASK])


def test_calls_and_results_reach_the_prompt(service: Service, tokenizer: Any) -> None:
    """The history of an agent's loop, calls and results, is read as the template writes it."""
    history = [ASK, CALL, RESULT]
    assert prompt_of(service, history, tools=[CALCULATOR]) == template_ids(tokenizer, history, [CALCULATOR])


@local_only
def test_loop_of_the_openai_client(service: Service) -> None:
    """Ask, call, result, answer: the client's own messages go back in, and turn 2 continues turn 1's tokens."""
    client = service.openai()
    fields: dict[str, Any] = {"model": POLICY, "temperature": 0, "tools": [CALCULATOR], "max_tokens": 64}
    first = client.chat.completions.create(messages=[ASK], **fields)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "calculator"
    assert set(json.loads(call.function.arguments)) == {"expression"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    said = choice.message.model_dump(exclude_none=True)
    second = client.chat.completions.create(messages=[ASK, said, result], **fields)
    assert "42" in (second.choices[0].message.content or "")
    one, two = service.recorded(first.id), service.recorded(second.id)
    sampled = one.prompt_ids + one.completion_ids
    assert two.prompt_ids[: len(sampled)] == sampled


@local_only
def test_streamed_call_is_the_same_call(service: Service) -> None:
    """A stream brings the call as deltas with an index, and no text of its markup."""
    client = service.openai()
    fields: dict[str, Any] = {"model": POLICY, "temperature": 0, "tools": [CALCULATOR], "max_tokens": 64}
    whole = client.chat.completions.create(messages=[ASK], **fields)  # type: ignore[list-item]
    chunks = list(client.chat.completions.create(messages=[ASK], stream=True, **fields))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert {call.index for call in calls} == {0}
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    [expected] = whole.choices[0].message.tool_calls or []
    assert expected.type == "function"
    assert json.loads(arguments) == json.loads(expected.function.arguments)
    assert "tool_call" not in "".join(delta.content or "" for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_two_results_and_text_beside_a_call(service: Service, tokenizer: Any) -> None:
    """Several calls in one message, with text beside them and one result each, are taken."""
    calls = [CALL["tool_calls"][0], CALL["tool_calls"][0] | {"id": "call_2"}]
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    history = [ASK, said, RESULT, RESULT | {"tool_call_id": "call_2"}]
    assert prompt_of(service, history, tools=[CALCULATOR]) == template_ids(tokenizer, history, [CALCULATOR])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": 3}}]},
        {"role": "assistant", "tool_calls": "calculator"},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]},
        {"role": "user", "content": [{}]},
        {"role": "user", "content": {"text": "x"}},
        {"role": "wizard", "content": "x"},
        {"content": "x"},
    ],
    ids=lambda message: str(message)[:60],
)
def test_malformed_message_is_refused(service: Service, message: dict[str, Any]) -> None:
    """A message that the template cannot read is the caller's error and says so."""
    response = service.post_chat(messages=[message], tools=[CALCULATOR])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("messages")
