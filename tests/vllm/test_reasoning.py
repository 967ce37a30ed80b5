"""A server that tells reasoning from the answer: the client gets both apart, and what is recorded stays exact."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.events.schema import CompletionEvent
from app.settings import TINY_MODEL
from learner.tiny.tool_dialogues import CALCULATOR
from tests.scoring import worst_difference
from tests.service import Service, chunks_of, stream_data
from tests.vllm.conftest import VllmProcess

TOLERANCE = 1e-4
SEEDS = range(16)
END = "</think>"
SUM: list[dict[str, Any]] = [{"role": "user", "content": "What is 12 + 30?"}]
TOOLS = pytest.mark.parametrize("tools", [None, [CALCULATOR]], ids=["plain", "tools"])


@dataclass(frozen=True)
class Said:
    """What the client has of one answer, put together from its deltas if it was streamed."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


def write_thinker(directory: Path) -> Path:
    """The tiny model, whose template opens with <think>: </think> is as likely as a full stop, and the answer follows.

    It starts a new turn for whoever reads on: its embedding is that of the word `assistant`.
    """
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    [stop, newline, assistant] = (tokenizer.encode(text)[0] for text in (".", "\n", "assistant"))
    [opened, closed] = tokenizer.encode("<think>" + END)
    embedding = model.get_input_embeddings().weight.data
    head = embedding.clone()
    head[closed] = embedding[stop]
    embedding[opened], embedding[closed] = embedding[newline].clone(), embedding[assistant].clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, directory)
    template = (TINY_MODEL / "chat_template.jinja").read_text(encoding="utf-8")
    asked = "add_generation_prompt %}{{- '<|im_start|>assistant\\n"
    said = "{%- generation %}"
    assert asked in template
    assert said in template
    thought = "{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
    template = template.replace(asked, asked + "<think>").replace(said, said + thought)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def tokenizer(thinker: Path) -> Any:
    return AutoTokenizer.from_pretrained(thinker)


@pytest.fixture(scope="module")
def model(thinker: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(thinker, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["qwen3", "deepseek_r1"])
def service(request: Any, thinker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service on a server with a reasoning parser: one that holds text back, and one that knows no tools."""
    server = VllmProcess(tmp_path_factory.mktemp("vllm"), thinker, ["--reasoning-parser", request.param])
    server.start()
    extra = {"RIACHO_ENGINE_URLS": server.url, "RIACHO_MODEL": str(thinker)}
    with Service(tmp_path_factory.mktemp("home"), extra=extra) as running:
        yield running
    server.stop()


def ask(service: Service, stream: bool, **fields: Any) -> tuple[CompletionEvent, Said]:
    """One answer: its record, and what the client has."""
    fields = {"messages": SUM, "max_tokens": 48, "stream": stream} | fields
    response = service.post_chat(**fields)
    assert response.status_code == 200, response.text
    if not stream:
        body = response.json()
        message = body["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls", [])]
        calls = tuple((function["name"], function["arguments"]) for function in functions)
        said = Said(message.get("reasoning_content", ""), message["content"] or "", calls)
        return service.recorded(body["id"]), said
    chunks = chunks_of(stream_data(response.text.splitlines()))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for part in [call for delta in deltas for call in delta.get("tool_calls", [])]:
        index, function = part["index"], part["function"]
        names[index] = names.get(index, "") + (function.get("name") or "")
        arguments[index] = arguments.get(index, "") + (function.get("arguments") or "")
    reasoning, content = ("".join(delta.get(key, "") for delta in deltas) for key in ("reasoning_content", "content"))
    calls = tuple((names[index], arguments[index]) for index in names)
    return service.recorded(chunks[0]["id"]), Said(reasoning, content, calls)


@TOOLS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_ids_and_logprobs_are_those_of_transformers(
    service: Service, model: Any, tokenizer: Any, record_property: Any, stream: bool, tools: Any
) -> None:
    """Every token is recorded with its logprob, those of the markers and of text that a parser held back included."""
    prompt = tokenizer.apply_chat_template(SUM, tools=tools, add_generation_prompt=True, return_dict=True)["input_ids"]
    worst, ended = 0.0, 0
    for seed in SEEDS:
        event, said = ask(service, stream, seed=seed, tools=tools)
        assert event.trainable, event.not_trainable_reason
        assert list(event.prompt_ids) == prompt
        worst = max(worst, worst_difference(model, event))
        thought, end, answer = tokenizer.decode(event.completion_ids, skip_special_tokens=True).partition(END)
        ended += bool(end)
        if END in answer or "<tool_call>" in thought + answer:
            continue  # what a parser makes of these is its own affair
        assert (said.reasoning, said.content) == (thought, answer)
    assert ended
    record_property("worst", worst)
    assert worst <= TOLERANCE


@TOOLS
def test_streamed_or_not_it_is_the_same(service: Service, tools: Any) -> None:
    """Reasoning, answer and calls; among some seeds there is an answer with a call after its reasoning."""
    both = 0
    for seed in SEEDS:
        whole, said = ask(service, False, seed=seed, tools=tools)
        streamed, pieces = ask(service, True, seed=seed, tools=tools)
        assert streamed.completion_ids == whole.completion_ids
        assert pieces == said
        assert (whole.finish_reason == "tool_calls") == bool(said.calls)
        both += bool(said.reasoning and (said.calls if tools else said.content))
    assert both


def test_earlier_reasoning_reaches_the_template(service: Service, model: Any, tokenizer: Any) -> None:
    """A client that sends an answer back with its reasoning gets the prompt of the model's own template."""
    said = {"role": "assistant", "content": "It is 42.", "reasoning_content": "12 plus 30 is 42."}
    messages = [*SUM, said, {"role": "user", "content": "And 3 more?"}]
    event, _ = ask(service, False, messages=messages, seed=1)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(event.prompt_ids) == prompt
    assert said["reasoning_content"] in tokenizer.decode(prompt)
    assert event.trainable
    assert worst_difference(model, event) <= TOLERANCE


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"tools": [CALCULATOR], "tool_choice": "required"}],
    ids=lambda fields: list(fields)[-1],
)
def test_a_grammar_after_reasoning_is_not_trained_on(service: Service, fields: dict[str, Any]) -> None:
    """It is served, and marked with the reason.

    Asked something that calls no tool: where <tool_call> ends the reasoning, vLLM's grammar refuses that very token.
    """
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    event, _ = ask(service, True, messages=messages, seed=1, **fields)
    assert event.completion_ids
    assert event.not_trainable_reason == "the output was constrained"
