"""What is recorded is what was sampled: an independent recomputation gives the same ids and logprobs."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.events.schema import CompletionEvent
from learner.tiny.tool_dialogues import CALCULATOR
from tests.precision import require_another
from tests.publishing import Publisher
from tests.scoring import differences
from tests.service import MODEL, Service, stream_data
from tests.vllm.conftest import TOLERANCE

SEEDS = range(4)
SUM: list[dict[str, Any]] = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def publisher(service: Service) -> Iterator[Publisher]:
    """Its adapters' effect stands out from the noise of any dtype."""
    publisher = Publisher(service.home, scale=0.2)
    yield publisher
    publisher.close()


@pytest.fixture(scope="module")
def models(service: Service, publisher: Publisher) -> dict[str, Any]:
    """The base and version 1, as transformers and peft compute them; version 1 is live in the service."""
    publisher.publish(1)
    asyncio.run(publisher.wait_live(1))

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    adapted = PeftModel.from_pretrained(base(), str(service.home / "adapters/riacho/1")).eval()
    return {"riacho@base": base(), "riacho@1": adapted}


def ask(service: Service, stream: bool, **fields: Any) -> tuple[CompletionEvent, str, list[dict[str, Any]]]:
    """One answer: its record, the text and the tool calls that the client has."""
    response = service.post_chat(messages=SUM, max_tokens=48, stream=stream, **fields)
    assert response.status_code == 200, response.text
    if not stream:
        body = response.json()
        message = body["choices"][0]["message"]
        return service.recorded(body["id"]), message["content"] or "", message.get("tool_calls", [])
    data = stream_data(response.text.splitlines())
    assert data[-1] == "[DONE]"
    deltas = [json.loads(item)["choices"][0]["delta"] for item in data[:-1]]
    calls: dict[int, dict[str, Any]] = {}
    for part in [call for delta in deltas for call in delta.get("tool_calls", [])]:
        known = calls.setdefault(part["index"], {"function": {"arguments": ""}})
        known["function"]["name"] = part["function"].get("name") or known["function"].get("name")
        known["function"]["arguments"] += part["function"].get("arguments") or ""
    text = "".join(delta.get("content") or "" for delta in deltas)
    return service.recorded(json.loads(data[0])["id"]), text, list(calls.values())


@pytest.mark.parametrize("tools", [None, [CALCULATOR]], ids=["plain", "tools"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["riacho@base", "riacho@1"])
def test_ids_and_logprobs_are_those_of_transformers_and_peft(
    service: Service,
    models: dict[str, Any],
    tokenizer: Any,
    record_property: Any,
    name: str,
    temperature: float,
    stream: bool,
    tools: list[dict[str, Any]] | None,
) -> None:
    """Prompt ids are the template's, every sampled token is recorded with its logprob, and all can be trained on."""
    prompt = tokenizer.apply_chat_template(SUM, tools=tools, add_generation_prompt=True, return_dict=True)["input_ids"]
    found: list[float] = []
    for seed in SEEDS:
        event, text, calls = ask(service, stream, model=name, temperature=temperature, seed=seed, tools=tools)
        assert event.trainable, event.not_trainable_reason
        assert list(event.prompt_ids) == prompt
        decoded = tokenizer.decode(event.completion_ids, skip_special_tokens=True)
        if not calls:
            assert text == decoded
        for call in calls:
            assert call["function"]["name"] in decoded
            assert json.loads(call["function"]["arguments"]) is not None
        found += differences(models[name], event)
    record_property("worst", max(found))
    record_property("mean", sum(found) / len(found))
    TOLERANCE.require(found)


def test_tool_calls_arrive_whole_and_can_be_trained_on(service: Service, models: dict[str, Any]) -> None:
    """Among some seeds the base calls the tool; streamed or not, it is the same call, with every token recorded."""
    called = 0
    for seed in range(8):
        fields: dict[str, Any] = {"model": "riacho@base", "temperature": 0.7, "seed": seed, "tools": [CALCULATOR]}
        whole, _, calls = ask(service, False, **fields)
        streamed, _, pieces = ask(service, True, **fields)
        assert streamed.completion_ids == whole.completion_ids
        functions = [call["function"] for call in calls]
        assert functions == [call["function"] for call in pieces]
        assert (whole.finish_reason == "tool_calls") == bool(calls)
        called += bool(calls)
    assert called


def test_strict_tools_are_sampled_freely(service: Service, models: dict[str, Any]) -> None:
    """`strict`, which some agent frameworks set, brings no grammar: the same seed gives the same tokens without it."""
    strict = CALCULATOR | {"function": CALCULATOR["function"] | {"strict": True}}
    for seed in SEEDS:
        fields: dict[str, Any] = {"model": "riacho@base", "temperature": 1.5, "seed": seed}
        free, _, _ = ask(service, False, tools=[CALCULATOR], **fields)
        told, _, _ = ask(service, False, tools=[strict], parallel_tool_calls=False, **fields)
        assert told.prompt_ids == free.prompt_ids
        assert told.completion_ids == free.completion_ids
        assert told.trainable


def test_the_adapter_is_applied(service: Service, models: dict[str, Any]) -> None:
    """What version 1 sampled is clearly not what the base gives: agreement above means something."""
    events = [ask(service, False, model="riacho@1", seed=seed)[0] for seed in SEEDS]
    require_another([difference for event in events for difference in differences(models["riacho@base"], event)])


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"temperature": 0},
        {"logit_bias": {"5": 1}},
        {"response_format": {"type": "json_object"}},
        {"tools": [CALCULATOR], "tool_choice": "required"},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_a_bent_distribution_serves_and_is_not_trained_on(service: Service, fields: dict[str, Any]) -> None:
    """What the learner cannot recompute is answered all the same, and marked with the reason."""
    event, _, _ = ask(service, True, model="riacho@base", **fields)
    assert event.completion_ids
    assert not event.trainable
    assert event.not_trainable_reason
