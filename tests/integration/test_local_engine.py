"""The local engine on real models: what it samples is what transformers and peft would, version by version."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from app.engines.base import Adapter, Chunk, GenerateRequest  # noqa: E402
from app.engines.local import LocalEngine  # noqa: E402
from app.errors import AdapterRejected, ContextTooLong, InvalidRequest, SetupError, Unavailable  # noqa: E402
from app.events.schema import Sampling  # noqa: E402
from tests.publishing import save_adapter  # noqa: E402
from tests.smollm2 import default_cache, smollm2_dir  # noqa: E402

TINY = Path(__file__).parents[2] / "app" / "models" / "tiny-qwen3"
POLICY = "riacho"
PROMPT = [{"role": "user", "content": "Write about the cat."}]
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def request(*, messages: list[dict[str, Any]] | None = None, **options: Any) -> GenerateRequest:
    """A request for the usual prompt; options go to Sampling or to the request, wherever the name belongs."""
    names = Sampling.model_fields.keys() - {"logit_bias"}
    sampling = {"temperature": 1.0, "max_tokens": 24} | {name: options.pop(name) for name in names & options.keys()}
    return GenerateRequest(messages=messages or PROMPT, sampling=Sampling(**sampling), **options)


@dataclass
class Answer:
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    text: str
    chunks: list[Chunk]

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]


async def answer(engine: LocalEngine, version: int = 0, **options: Any) -> Answer:
    """One whole answer, with what every stream has to keep to checked."""
    chunks = [chunk async for chunk in engine.generate(request(**options), version)]
    assert chunks[0].prompt_ids
    assert all(chunk.prompt_ids is None for chunk in chunks[1:])
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert all(len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.details) for chunk in chunks)
    return Answer(
        prompt_ids=list(chunks[0].prompt_ids),
        ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        text="".join(chunk.text for chunk in chunks),
        chunks=chunks,
    )


def make_adapter(directory: Path, seed: int, *, config: type[Any] = LoraConfig, **options: Any) -> Path:
    """An adapter of random weights, B included, as peft saves it; scaled so that it changes greedy answers."""
    torch.manual_seed(seed)
    options = {"target_modules": "all-linear", "init_weights": False, **options}
    if config is LoraConfig:
        options = {"lora_alpha": 64, "init_lora_weights": options.pop("init_weights"), **options}
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = get_peft_model(base, config(task_type="CAUSAL_LM", **options)).eval()
    save_adapter(model, directory, likely=500)  # so strong an adapter leaves little of the base's likeliest
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Adapter]:
    """Versions 1 and 2 on all linear layers, 3 of another shape: rank 4 on attention only."""
    root = tmp_path_factory.mktemp("adapters")
    shapes: dict[int, dict[str, Any]] = {1: {}, 2: {}, 3: {"r": 4, "target_modules": ["q_proj", "v_proj"]}}
    return {
        version: Adapter(POLICY, version, make_adapter(root / str(version), version, **shape))
        for version, shape in shapes.items()
    }


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(str(TINY), policy=POLICY, slots=3, device="cpu")
    await engine.start()
    yield engine
    await engine.close()


def reference_model(adapter: Adapter | None, model: Path = TINY) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return base if adapter is None else PeftModel.from_pretrained(base, str(adapter.path)).eval()


def rescored(model: Any, made: Answer, temperature: float = 1.0) -> Any:
    """The logprobs of an answer's tokens by one pass of the model over all of it."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([made.prompt_ids + made.ids])).logits[0].float()
    logits = logits[len(made.prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(made.ids)[:, None])[:, 0]


# Versions


async def test_versions_decode_side_by_side_as_each_would_alone(
    engine: LocalEngine, adapters: dict[int, Adapter]
) -> None:
    """Interleaved greedy answers of the base and three versions equal transformers' own, one model at a time."""
    for adapter in adapters.values():
        await engine.load(adapter)
    assert engine.loaded() == {1, 2, 3}
    versions = [0, 1, 2, 3, 1, 0]
    made = await asyncio.gather(*(answer(engine, version, temperature=0.0) for version in versions))
    for version, one in zip(versions, made, strict=True):
        model = reference_model(adapters.get(version))
        output = model.generate(torch.tensor([one.prompt_ids]), max_new_tokens=24, do_sample=False)
        assert one.ids == output[0, len(one.prompt_ids) :].tolist()
    assert len({tuple(one.ids) for one in made}) == 4


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_the_distribution_sampled(
    engine: LocalEngine, adapters: dict[int, Adapter], temperature: float
) -> None:
    """They agree with one pass over the finished answer; a greedy answer's are those at temperature 1."""
    for version in (1, 2):
        await engine.load(adapters[version])
    made = await asyncio.gather(
        *(answer(engine, version, temperature=temperature, seed=version) for version in (0, 1, 2))
    )
    for version, one in enumerate(made):
        expected = rescored(reference_model(adapters.get(version)), one, temperature or 1.0)
        assert torch.allclose(torch.tensor(one.logprobs), expected, atol=1e-4)


async def test_a_version_can_leave_and_another_take_its_place(
    engine: LocalEngine, adapters: dict[int, Adapter]
) -> None:
    """Unloading all and loading again changes no answer, and an unloaded version cannot be asked for."""
    base = await answer(engine, temperature=0.0)
    await engine.load(adapters[1])
    first = await answer(engine, 1, temperature=0.0)
    await engine.load(adapters[1])  # again: nothing to do
    await engine.unload(1)
    await engine.unload(1)
    assert engine.loaded() == frozenset()
    with pytest.raises(Unavailable, match="version 1 is not loaded"):
        await answer(engine, 1)
    assert (await answer(engine, temperature=0.0)).ids == base.ids
    await engine.load(adapters[3])
    await engine.load(adapters[1])
    assert (await answer(engine, 1, temperature=0.0)).ids == first.ids
    assert (await answer(engine, temperature=0.0)).ids == base.ids


# Turns


async def test_a_short_answer_overtakes_a_long_one(engine: LocalEngine) -> None:
    """Answers take turns token by token, so a short one needs about twice its own steps beside a long one."""
    order: list[str] = []

    async def follow(name: str, tokens: int) -> None:
        async for chunk in engine.generate(request(max_tokens=tokens, logit_bias={_end(): -100.0}), 0):
            order.extend([name] * len(chunk.token_ids))

    long = asyncio.create_task(follow("long", 200))
    while order.count("long") < 10 and not long.done():
        await asyncio.sleep(0.001)
    began = len(order)
    await follow("short", 10)
    assert len(order) - began <= 30
    assert not long.done()
    await long
    assert order.count("long") == 200


async def test_the_event_loop_stays_free(engine: LocalEngine) -> None:
    """Other work in the loop goes on while tokens are made."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticker = asyncio.create_task(tick())
    made = await answer(engine, logit_bias={_end(): -100.0})
    ticker.cancel()
    assert ticks > 5 * len(made.ids)


async def test_tokens_come_one_by_one(engine: LocalEngine) -> None:
    made = await answer(engine, logit_bias={_end(): -100.0})
    assert [len(chunk.token_ids) for chunk in made.chunks] == [0] + [1] * 24
    assert made.last.finish_reason == "length"
    assert made.text == AutoTokenizer.from_pretrained(TINY).decode(made.ids)


async def test_an_answer_that_nobody_reads_makes_no_more_steps(
    engine: LocalEngine, adapters: dict[int, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.load(adapters[1])
    steps, step = 0, engine._model.step

    def counted(made: Any) -> Chunk:
        nonlocal steps
        steps += 1
        return step(made)

    monkeypatch.setattr(engine._model, "step", counted)
    stream = engine.generate(request(max_tokens=500, logit_bias={_end(): -100.0}), 1)
    for _ in range(4):
        await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0.1)
    assert steps == 3
    await engine.unload(1)
    assert (await answer(engine)).ids


async def test_a_request_that_is_cancelled_while_it_waits_stops(engine: LocalEngine) -> None:
    task = asyncio.create_task(answer(engine, max_tokens=900, logit_bias={_end(): -100.0}))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await answer(engine)).ids


async def test_a_request_that_fails_takes_no_other_with_it(engine: LocalEngine) -> None:
    """The error reaches its own caller; an answer beside it and later ones are whole."""
    beside, broken = await asyncio.gather(
        answer(engine, seed=1), answer(engine, logit_bias={5: float("nan")}), return_exceptions=True
    )
    assert isinstance(broken, RuntimeError)
    assert isinstance(beside, Answer)
    assert (await answer(engine, seed=1)).ids == beside.ids


async def test_closing_the_engine_ends_answers_as_aborted() -> None:
    engine = LocalEngine(str(TINY), policy=POLICY, device="cpu")
    await engine.start()
    assert await engine.healthy()
    stream = engine.generate(request(max_tokens=500, logit_bias={_end(): -100.0}), 0)
    for _ in range(3):
        await anext(stream)
    await engine.close()
    assert not await engine.healthy()
    assert [chunk.finish_reason async for chunk in stream] == ["abort"]
    with pytest.raises(Unavailable):
        await answer(engine)


# Sampling


async def test_a_seed_repeats_an_answer(engine: LocalEngine) -> None:
    first, again, other, free = [await answer(engine, seed=seed) for seed in (11, 11, 12, None)]
    assert (first.ids, first.logprobs) == (again.ids, again.logprobs)
    assert first.ids != other.ids
    assert first.ids != free.ids


async def test_top_alternatives_come_from_the_same_distribution(engine: LocalEngine) -> None:
    made = await answer(engine, top_logprobs=5, top_k=3, seed=1)
    for chunk in made.chunks[1:]:
        (detail,) = chunk.details
        assert 1 <= len(detail.top) <= 3
        assert (detail.token, detail.logprob) in detail.top


async def test_penalties_and_bias_change_what_is_sampled(engine: LocalEngine) -> None:
    """A frequency penalty that outweighs all logits lets no token come twice."""
    made = await answer(engine, temperature=0.0, frequency_penalty=100.0, logit_bias={_end(): -1000.0})
    assert len(set(made.ids)) == len(made.ids) == 24
    assert (await answer(engine, temperature=0.0, max_tokens=1, logit_bias={7: 1000.0})).ids == [7]


async def test_a_stop_string_ends_the_text_before_it_and_keeps_the_record_whole(engine: LocalEngine) -> None:
    whole = await answer(engine, temperature=0.0)
    stop = whole.text[len(whole.text) // 2 :][:9]
    cut = await answer(engine, temperature=0.0, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.last.finish_reason == "stop"
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert stop in AutoTokenizer.from_pretrained(TINY).decode(cut.ids)


async def test_the_end_of_turn_is_recorded_and_not_shown(engine: LocalEngine) -> None:
    made = await answer(engine, logit_bias={_end(): 1000.0})
    assert made.ids == [_end()]
    assert (made.text, made.last.finish_reason) == ("", "stop")


async def test_calls_come_as_openai_tool_calls_and_round_trip_to_the_same_tokens(engine: LocalEngine) -> None:
    """The answer, sent back by the client, starts the next prompt with exactly the tokens that were sampled."""
    messages = [{"role": "user", "content": "I have 381 apples and buy 455 more. How many are there?"}]
    made = [await answer(engine, messages=messages, tools=[CALCULATOR], seed=seed, max_tokens=60) for seed in range(12)]
    calling = [one for one in made if one.last.tool_calls]
    assert calling
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for one in calling:
        assert one.last.finish_reason == "tool_calls"
        assert "<tool_call>" not in one.text
        assert all(json.loads(call["function"]["arguments"]) is not None for call in one.last.tool_calls)
        reply = {"role": "assistant", "content": one.text or None, "tool_calls": list(one.last.tool_calls)}
        result = {"role": "tool", "content": [{"type": "text", "text": "836"}]}
        after = await answer(engine, messages=[*messages, reply, result], tools=[CALCULATOR], max_tokens=1)
        assert after.prompt_ids[: len(one.prompt_ids + one.ids)] == one.prompt_ids + one.ids
        assert "836" in tokenizer.decode(after.prompt_ids)


async def test_tool_choice_none_hides_the_tools(engine: LocalEngine) -> None:
    without = await answer(engine, max_tokens=1)
    hidden = await answer(engine, max_tokens=1, tools=[CALCULATOR], tool_choice="none")
    assert hidden.prompt_ids == without.prompt_ids


# Refusals


async def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(engine: LocalEngine) -> None:
    with pytest.raises(ContextTooLong, match=r"prompt has \d{4} tokens and max_tokens is 24.*context length is 1024"):
        await answer(engine, messages=[{"role": "user", "content": "cat " * 1200}])


async def test_max_tokens_is_cut_to_the_room_that_is_left(engine: LocalEngine) -> None:
    messages = [{"role": "user", "content": "cat " * 1000}]
    made = await answer(engine, messages=messages, max_tokens=1000, logit_bias={_end(): -100.0})
    assert len(made.prompt_ids) + len(made.ids) == 1024
    assert made.last.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [CALCULATOR], "tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {999_999: 1.0}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ],
)
async def test_what_the_engine_cannot_do_is_refused_by_name(
    engine: LocalEngine, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await answer(engine, **options)
    assert caught.value.param == param


async def test_text_formats_are_no_structured_output(engine: LocalEngine) -> None:
    assert (await answer(engine, response_format={"type": "text"}, max_tokens=1)).ids


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


async def test_a_template_that_refuses_the_messages_says_why(model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    engine = LocalEngine(str(model_copy), policy=POLICY, device="cpu")
    await engine.start()
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await answer(engine)
    await engine.close()


async def test_a_model_without_a_chat_template_does_not_start(model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").unlink()
    with pytest.raises(SetupError, match=r"no chat template.*chat_template\.jinja"):
        await LocalEngine(str(model_copy), policy=POLICY, device="cpu").start()


async def test_a_missing_model_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="Cannot load the model"):
        await LocalEngine(str(tmp_path), policy=POLICY, device="cpu").start()


# Adapters that must not load


def _tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, directory / "adapter_model.safetensors")

    return apply


def _options(**options: Any) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **options}))

    return apply


def _saved(**options: Any) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        shutil.rmtree(directory)
        make_adapter(directory, 9, **options)

    return apply


def _truncate(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _rename(tensors: dict[str, Any]) -> None:
    key = next(iter(tensors))
    tensors[key.replace("layers.0", "layers.99")] = tensors.pop(key)


def _poison(tensors: dict[str, Any]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "renamed tensor": (_tensors(_rename), r"unknown tensors: base_model.*layers\.99"),
    "missing tensor": (_tensors(lambda tensors: tensors.popitem()), "missing tensors: base_model"),
    "NaN": (_tensors(_poison), "not finite: base_model"),
    "truncated file": (_truncate, "cannot be read"),
    "missing directory": (shutil.rmtree, "no directory"),
    "missing weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "cannot be read"),
    "missing config": (lambda path: (path / "adapter_config.json").unlink(), "cannot be read"),
    "broken config": (lambda path: (path / "adapter_config.json").write_text("{"), "cannot be read"),
    "config that is a list": (lambda path: (path / "adapter_config.json").write_text("[]"), "only LORA"),
    "pickle": (lambda path: (path / "adapter_model.bin").touch(), r"adapter_model\.bin.*pickle"),
    "DoRA": (_saved(use_dora=True), "use_dora"),
    "modules_to_save": (_saved(modules_to_save=["lm_head"]), "modules_to_save"),
    "trained tokens": (_saved(trainable_token_indices=[5]), "trainable_token_indices"),
    "bias": (_options(bias="all"), "bias = all"),
    "LoHa": (_saved(config=LoHaConfig, target_modules=["q_proj"]), "only LORA"),
    "PiSSA": (_options(init_lora_weights="pissa"), "init_lora_weights = pissa"),
    "other rank than its tensors": (_options(r=4), "another shape: base_model"),
    "rank 0": (_options(r=0), "rank 0"),
    "modules that the base lacks": (_options(target_modules=["no_proj"]), "does not fit the base"),
    "module that takes no LoRA": (_options(target_modules=["input_layernorm"]), "does not fit the base"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_adapter_is_refused_and_leaves_the_others_as_they_were(
    engine: LocalEngine, adapters: dict[int, Adapter], tmp_path: Path, case: str
) -> None:
    change, message = BROKEN[case]
    path = Path(shutil.copytree(adapters[2].path, tmp_path / "adapter"))
    change(path)
    with pytest.raises(AdapterRejected, match=message):  # also as the first one, when nothing is wrapped yet
        await engine.load(Adapter(POLICY, 7, path))
    await engine.load(adapters[1])
    before = [await answer(engine, version, temperature=0.0) for version in (0, 1)]
    with pytest.raises(AdapterRejected, match=message):
        await engine.load(Adapter(POLICY, 7, path))
    assert engine.loaded() == {1}
    after = [await answer(engine, version, temperature=0.0) for version in (0, 1)]
    assert [(one.ids, one.logprobs) for one in before] == [(one.ids, one.logprobs) for one in after]
    await engine.load(Adapter(POLICY, 7, adapters[2].path))
    made = await answer(engine, 7, temperature=0.0)
    assert torch.allclose(torch.tensor(made.logprobs), rescored(reference_model(adapters[2]), made), atol=1e-4)


async def test_slots_are_not_exceeded(engine: LocalEngine, adapters: dict[int, Adapter]) -> None:
    for version in (1, 2, 3):
        await engine.load(adapters[version])
    fourth = Adapter(POLICY, 4, adapters[1].path)
    with pytest.raises(AdapterRejected, match=r"all 3 adapter slots are taken by \[1, 2, 3\]"):
        await engine.load(fourth)
    await engine.unload(2)
    await engine.load(fourth)
    assert engine.loaded() == {1, 3, 4}


async def test_another_policys_adapter_is_refused(engine: LocalEngine, adapters: dict[int, Adapter]) -> None:
    with pytest.raises(AdapterRejected, match="another policy"):
        await engine.load(Adapter("other", 1, adapters[1].path))


# A model that others trained


async def test_smollm2_is_served_and_its_logprobs_are_exact() -> None:
    """A real Llama from a package index: its answer is text, and its logprobs are those of one pass over it."""
    directory = smollm2_dir(default_cache())
    engine = LocalEngine(str(directory), policy=POLICY, device="cpu")
    await engine.start()
    made = await answer(engine, seed=5, messages=[{"role": "user", "content": "Name three colours."}])
    await engine.close()
    expected = rescored(reference_model(None, directory), made)
    assert (torch.tensor(made.logprobs) - expected).abs().mean() < 1e-4
    assert len(made.text.split()) > 3


def _end() -> int:
    """The tiny model's end of turn."""
    return int(json.loads((TINY / "config.json").read_text())["eos_token_id"])
