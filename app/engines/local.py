"""The quick start's engine: transformers and peft in this process, on the CPU or on one accelerator.

One thread owns the model and takes one short task at a time: read a prompt, make one token of one answer, load an
adapter. Every answer puts its next step at the end of the thread's queue, so answers take turns token by token, a
load happens between two tokens, an iterator that is closed asks for no more steps, and an error belongs to the
request whose step it was. Batching is vLLM's business, not this engine's.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

import torch
from jinja2 import TemplateError
from peft import PeftModel, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from app.engines.adapter_files import AdapterReader
from app.engines.adapter_options import require_slot
from app.engines.base import (
    BASE_VERSION,
    Adapter,
    Chunk,
    Engine,
    EngineInfo,
    EngineState,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
)
from app.engines.detokenize import Detokenizer, StopStrings
from app.engines.messages import for_template
from app.engines.probe import require_reproduced
from app.engines.sampler import Draw, distribution, draw, seeded
from app.engines.tool_calls import ToolCallParser
from app.errors import AdapterRejected, ContextTooLong, InvalidRequest, SetupError, Unavailable
from app.fingerprint import fingerprint
from app.probe import Probe

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class LocalEngine(Engine):
    """Serves one model and up to `slots` adapter versions of one policy in this process.

    Args:
        model: a Hugging Face directory with safetensors weights and a chat template, or a hub name.
        policy: whose adapters these are; others are refused.
        slots: how many adapter versions may be loaded at once.
        threads: torch's threads for one step, on a CPU.
        device: a torch device; by default CUDA, MPS or the CPU, whichever there is first.
    """

    def __init__(self, model: str, *, policy: str, slots: int = 8, threads: int = 1, device: str | None = None) -> None:
        self._policy = policy
        self._slots = slots
        self._model = _Model(model, device or _best_device())
        self._worker = ThreadPoolExecutor(1, "local-engine", torch.set_num_threads, (threads,))
        self._ready = False
        self._running = 0

    async def start(self) -> None:
        model = self._model
        await self._run(model.open)
        dtype = str(model.dtype).removeprefix("torch.")
        self.info = EngineInfo(model.name, await self._run(fingerprint, model.name), dtype, model.context, self._slots)
        self._ready = True

    async def generate(self, request: GenerateRequest, version: int) -> AsyncGenerator[Chunk, None]:
        if not self._ready:
            raise Unavailable("The local engine is not running.")
        answer = await self._run(self._model.prepare, request, version)
        chunk = Chunk(prompt_ids=answer.prompt_ids)
        self._running += 1
        try:
            while True:
                yield chunk
                if chunk.finish_reason is not None:
                    return
                chunk = await self._run(self._model.step, answer) if self._ready else answer.abort()
        finally:
            self._running -= 1

    async def load(self, adapter: Adapter) -> None:
        if adapter.policy != self._policy:
            raise AdapterRejected(f"{adapter.name} belongs to another policy than {self._policy}.")
        await self._run(self._model.load, adapter, self._slots)

    async def unload(self, version: int) -> None:
        await self._run(self._model.unload, version)

    def loaded(self) -> frozenset[int]:
        return frozenset(self._model.versions)

    def may_read(self, version: int) -> bool:
        return False  # an adapter's files are read once

    def states(self) -> list[EngineState]:
        problem = "" if self._ready else "it is not running"
        return [EngineState("local", self._ready, problem, self._running, tuple(sorted(self.loaded())))]

    async def healthy(self) -> bool:
        return self._ready

    async def close(self) -> None:
        self._ready = False
        await asyncio.to_thread(self._worker.shutdown)

    async def _run(self, task: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Run `task` on the model's thread, behind what already waits there."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, task, *args)


@dataclass(slots=True)
class _Answer:
    """One answer in the making. Only the model's thread changes it, and `abort` once no step is under way."""

    version: int
    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    limit: int
    ends: frozenset[int]
    decode: Callable[[list[int]], str]
    cache: DynamicCache
    generator: torch.Generator
    stops: StopStrings
    tools: ToolCallParser | None
    text: Detokenizer
    ids: list[int] = field(default_factory=list)

    @property
    def unread(self) -> list[int]:
        """The tokens that the model has not seen yet."""
        return self.ids[-1:] or list(self.prompt_ids)

    def accept(self, drawn: Draw) -> Chunk:
        """Take one sampled token in; what the client may see of it, and whether it was the last."""
        self.ids.append(drawn.token)
        ended = drawn.token in self.ends
        text = "" if ended else self.stops.feed(self.text.feed(drawn.token))
        reason: FinishReason | None = None
        if ended or self.stops.stopped:
            reason = "stop"
        elif len(self.ids) >= self.limit:
            reason = "length"
        return self._chunk(text, reason, drawn)

    def abort(self) -> Chunk:
        """The last chunk of an answer that is cut off from outside."""
        return self._chunk("", "abort")

    def _chunk(self, text: str, reason: FinishReason | None, drawn: Draw | None = None) -> Chunk:
        """`text` on its way through the tool parser, with all that was held back where there is a `reason` to end."""
        calls: tuple[dict[str, Any], ...] = ()
        if reason is not None:
            text += self.stops.feed(self.text.flush()) + self.stops.flush()
        if self.tools is not None:
            text = self.tools.feed(text)
            if reason is not None:
                rest, calls = self.tools.finish()
                text += rest
        if calls and reason == "stop":
            reason = "tool_calls"
        if drawn is None:
            return Chunk(text, tool_calls=calls, finish_reason=reason)
        top = tuple((self.decode([token]), logprob) for token, logprob in drawn.top)
        detail = TokenLogprob(self.decode([drawn.token]), drawn.logprob, top)
        return Chunk(text, (drawn.token,), (drawn.logprob,), (detail,), calls, finish_reason=reason)


class _Model:
    """The model, its tokenizer and its adapters. All methods run on the one thread that owns it."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.versions: set[int] = set()
        self._device = torch.device(device)
        self._peft: PeftModel | None = None
        self._layers: list[LoraLayer] = []
        self._active: int | None = None

    def open(self) -> None:
        """Read the model; raises SetupError where it cannot serve."""
        # bfloat16 is slow on most CPUs, and float32 keeps the logprobs within 1e-5 of the learner's.
        dtype = torch.float32 if self._device.type == "cpu" else "auto"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self.name)
            model = AutoModelForCausalLM.from_pretrained(self.name, dtype=dtype)
        except (OSError, ValueError, SafetensorError) as error:
            raise SetupError(
                f"Cannot load the model {self.name}: {error} Set RIACHO_MODEL to a Hugging Face directory "
                "or the name of a causal language model."
            ) from error
        if not self._tokenizer.chat_template:
            raise SetupError(
                f"The model {self.name} has no chat template, so it cannot answer chats. Use an instruction-tuned "
                "model, or put a chat_template.jinja into its directory."
            )
        self._knows_developer = "developer" in str(self._tokenizer.chat_template)
        self._base: Any = model.eval().requires_grad_(False)
        self._base.to(self._device)
        self._adapters = AdapterReader(model)
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config()
        self.context = int(getattr(config, "max_position_embeddings", None) or self._tokenizer.model_max_length)
        self._vocabulary = int(config.vocab_size)
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self._ends = frozenset(end for end in (*ends, self._tokenizer.eos_token_id) if end is not None)
        accepted = inspect.signature(model.forward).parameters
        # transformers 5 renames it.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def prepare(self, request: GenerateRequest, version: int) -> _Answer:
        """Check a request and tokenize its prompt; raises InvalidRequest or ContextTooLong."""
        self._check(request, version)
        tools = request.tools if request.tool_choice != "none" else None
        prompt_ids = self._prompt(request.messages, tools)
        wanted, room = request.sampling.max_tokens, self.context - len(prompt_ids)
        if room < 1:
            raise ContextTooLong(
                f"The prompt has {len(prompt_ids)} tokens and max_tokens is {wanted}, but the model's context "
                f"length is {self.context} tokens, prompt and answer together. Shorten the messages.",
                param="messages",
            )
        return _Answer(
            version=version,
            request=request,
            prompt_ids=prompt_ids,
            limit=min(wanted, room),
            ends=self._ends,
            decode=self._decode,
            cache=DynamicCache(config=self._base.config),
            generator=seeded(request.sampling.seed),
            stops=StopStrings(request.sampling.stop),
            tools=ToolCallParser() if tools else None,
            text=Detokenizer(lambda ids: self._decode(ids, skip_special_tokens=True)),
        )

    @torch.inference_mode()
    def step(self, answer: _Answer) -> Chunk:
        """Make the next token of one answer; the first step reads the whole prompt."""
        self._activate(answer.version)
        output = self._base(
            input_ids=torch.tensor([answer.unread], device=self._device),
            use_cache=True,
            **{self._cache_name: answer.cache},
            **self._options,
        )
        logits: Tensor = output.logits[0, -1]
        request = answer.request
        drawn = draw(
            distribution(logits, request.sampling, answer.ids, request.logit_bias),
            answer.generator,
            greedy=request.sampling.greedy,
            alternatives=request.top_logprobs,
        )
        return answer.accept(drawn)

    def load(self, adapter: Adapter, slots: int) -> None:
        """Add a version that reproduces its probe; raises AdapterRejected and leaves everything as it was."""
        if adapter.version in self.versions:
            return  # a version never changes, so it is the same
        require_slot(adapter, self.versions, slots)
        config, tensors = self._adapters.read(adapter)
        name = _slot(adapter.version)
        try:
            if self._peft is None:
                self._peft = PeftModel(self._base, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
            # peft looks up its active adapter on some bases, and the one that was active may have been unloaded.
            self._peft.set_adapter(name, inference_mode=True)
            set_peft_model_state_dict(self._peft, tensors, adapter_name=name)
        finally:  # even where memory ran out half-way, the next step finds every layer and sets it
            self._base.eval().requires_grad_(False)
            self._layers = [layer for layer in self._base.modules() if isinstance(layer, LoraLayer)]
            self._active = None
        self.versions.add(adapter.version)
        try:
            self._prove(adapter)
        except AdapterRejected:
            self.unload(adapter.version)
            raise

    def unload(self, version: int) -> None:
        """Forget a version; nothing happens if it is not there."""
        if self._peft is not None and version in self.versions:
            self.versions.remove(version)
            self._activate(BASE_VERSION)
            self._peft.delete_adapter(_slot(version))
            self._active = None

    def _prove(self, adapter: Adapter) -> None:
        probe = Probe.read(adapter.path)
        adapted, base = (self._score(version, probe) for version in (adapter.version, BASE_VERSION))
        require_reproduced(adapter, probe, adapted, base)

    @torch.inference_mode()
    def _score(self, version: int, probe: Probe) -> list[float]:
        """The logprobs of the probe's tokens under a version."""
        self._activate(version)
        found = []
        for context in probe.contexts:
            ids = torch.tensor([context.prompt_ids], device=self._device)
            table = self._base(input_ids=ids, **self._options).logits[0, -1].float().log_softmax(-1).tolist()
            found.append({token: table[token] for token in context.token_ids if token < len(table)})
        return probe.chosen(found)

    def _check(self, request: GenerateRequest, version: int) -> None:
        if version != BASE_VERSION and version not in self.versions:
            raise Unavailable(f"Adapter version {version} is not loaded; loaded are {sorted(self.versions)}.")
        if (request.response_format or {}).get("type", "text") != "text":
            raise InvalidRequest(
                "The local engine has no structured output: leave response_format out, or serve with vLLM.",
                param="response_format",
            )
        if request.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest(
                'The local engine cannot force a tool call: tool_choice may be "auto" or "none".',
                param="tool_choice",
            )
        foreign = [token for token in request.logit_bias if not 0 <= token < self._vocabulary]
        if foreign:
            raise InvalidRequest(
                f"logit_bias names token {foreign[0]}, but the vocabulary has {self._vocabulary} tokens.",
                param="logit_bias",
            )
        seed = request.sampling.seed
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise InvalidRequest(f"seed = {seed} is no 64-bit integer.", param="seed")

    def _prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[int, ...]:
        try:
            encoded = self._tokenizer.apply_chat_template(
                [for_template(message, knows_developer=self._knows_developer) for message in messages],
                tools=tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return tuple(encoded["input_ids"])

    def _decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _activate(self, version: int) -> None:
        """Let the LoRA layers answer as `version`.

        peft's set_adapter also visits every parameter of every adapter to set requires_grad, which takes half as long
        as a step (1.2 ms against .04 ms, tiny model, two adapters).
        """
        if version != BASE_VERSION and version not in self.versions:
            raise Unavailable(f"Adapter version {version} was unloaded while an answer needed it.")
        if version == self._active:
            return
        for layer in self._layers:
            layer._disable_adapters = version == BASE_VERSION
            layer._active_adapter = [] if version == BASE_VERSION else [_slot(version)]
        self._active = version


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _slot(version: int) -> str:
    return f"v{version}"
