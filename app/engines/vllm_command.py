"""The command that starts a vLLM server fit for learning, and why each part of it is there."""

import ipaddress
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.engines.adapter_shapes import attention_of_mixture, base_shapes
from app.engines.vllm_checks import MOST_ALTERNATIVES
from app.errors import SetupError
from app.fingerprint import model_directory

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
SERVED_NAME = "base"

# What always holds, with the reason: `riacho vllm --help` prints it.
FLAGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--served-model-name", SERVED_NAME), "one name for the base, whatever its path"),
    (("--enable-lora",), "versions are LoRA adapters"),
    (("--logprobs-mode", "processed_logprobs"), "logprobs of the distribution sampled from; the default is T = 1"),
    (("--max-logprobs", str(MOST_ALTERNATIVES)), "OpenAI's 20 alternatives beside the sampled token"),
    (("--generation-config", "vllm"), "the model's own top_k, temperature and length limit stay out"),
    (("--enable-scale-out",), "lets the app see the sampling defaults before traffic"),
    (("--enable-auto-tool-choice",), "tool calls are parsed where the client sends tools"),
)
VARIABLES: dict[str, tuple[str, str]] = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ("1", "new versions load while the server runs"),
    "VLLM_NO_USAGE_STATS": ("1", "sends nothing about its use"),
    "DO_NOT_TRACK": ("1", "sends nothing about its use"),
}
CPU_FLAGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--dtype", "float32"), "bfloat16 is slow on most CPUs, and float32 is exact to 1e-5"),
    (("--enforce-eager",), "nothing to compile on a CPU"),
)
CPU_VARIABLES: dict[str, tuple[str, str]] = {
    "TORCH_COMPILE_DISABLE": ("1", "without it the first request takes 20 s more"),
}
# vLLM finds the plugin by its metadata in this folder; what it mends is said there.
CPU_PLUGIN = Path(__file__).parent / "vllm_cpu"
# On a mixture of experts; the app refuses adapters that reach further.
MIXTURE_FLAG = "--lora-target-modules"
MIXTURE_WHY = "attention's layers, where the base is a mixture: no room for LoRA on every expert"
# What a further option of vLLM would break; the reason is shown.
_BREAKS = {
    "--logprobs-mode": "only processed_logprobs are those of the sampled distribution",
    "--generation-config": "only `vllm` keeps the model's own sampling defaults out",
    "--override-generation-config": "sampling defaults of the server bend what is learned",
    "--served-model-name": "the app finds the base by itself",
    "--max-logprobs": f"clients may ask for 20 alternatives, so it is {MOST_ALTERNATIVES}",
    "--lora-modules": "versions are loaded by the app, under names that it never reuses",
    MIXTURE_FLAG: "weights of an adapter outside these modules are ignored without a word",
    "--quantization": "the learner computes with the unquantised base, so behaviour logprobs would be another model's",
    "-q": "the learner computes with the unquantised base, so behaviour logprobs would be another model's",
    "--load-format": "other formats may fill the weights with noise (`dummy`) or change them",
    "--speculative-config": "logprobs with speculative decoding are not proved exact",
    "--skip-tokenizer-init": "chat needs the tokenizer",
    "--tool-strict-level": "a grammar would shape tool calls, and what is sampled so cannot be trained on",
    "--chat-template": "the learner and the local engine read the model's own template",
}
_DANGEROUS_VARIABLES = {
    "VLLM_LORA_RESOLVER_CACHE_DIR": "its resolver accepts `../` in model names",
    "VLLM_CPU_KVCACHE_SPACE": "it counts whole GiB and overrides --kv-cache-memory-bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """One server to start.

    Args:
        model: a model directory, the same as RIACHO_MODEL.
        slots: adapter versions kept in memory, at least as many as the app's `slots`.
        batch_loras: adapter versions in one batch; requests for more wait and stay exact.
        max_rank: the largest rank of an adapter; larger ones are refused.
        reasoning_parser: vLLM's parser that tells the model's reasoning from its answer; None: all is the answer.
        python: the interpreter of vLLM's environment.
        extra: further options of vLLM.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    cpu: bool = False
    slots: int = 8
    batch_loras: int = 2
    max_rank: int = 16
    max_context: int | None = None
    tool_parser: str = "hermes"
    reasoning_parser: str | None = None
    kv_cache_mib: int | None = None
    python: str = sys.executable
    extra: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The command line; raises SetupError for what breaks learning."""
        self._check()
        parts = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        parts += ["--model", str(model_directory(self.model).absolute()), "--host", self.host, "--port", str(self.port)]
        parts += [part for flag, _ in FLAGS for part in flag]
        parts += ["--tool-call-parser", self.tool_parser, "--max-lora-rank", str(self.max_rank)]
        if self.reasoning_parser is not None:
            parts += ["--reasoning-parser", self.reasoning_parser]
        parts += ["--max-loras", str(self.batch_loras), "--max-cpu-loras", str(self.slots)]
        if layers := self.lora_layers():
            parts += [MIXTURE_FLAG, *layers]
        if self.max_context is not None:
            parts += ["--max-model-len", str(self.max_context)]
        kv_cache_mib = 256 if self.cpu and self.kv_cache_mib is None else self.kv_cache_mib
        if kv_cache_mib is not None:
            parts += ["--kv-cache-memory-bytes", str(kv_cache_mib * 2**20)]
        if self.cpu:
            parts += [part for flag, _ in CPU_FLAGS for part in flag]
        return [*parts, *self.extra]

    def variables(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What the environment needs; raises SetupError for a variable there that breaks learning."""
        for name, why in _DANGEROUS_VARIABLES.items():
            if inherited.get(name):
                raise SetupError(f"{name} = {inherited[name]} is set: {why}; unset it")
        chosen = VARIABLES | (CPU_VARIABLES if self.cpu else {})
        variables = {name: value for name, (value, _) in chosen.items()}
        if self.cpu:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CPU_PLUGIN), inherited.get("PYTHONPATH")]))
        return variables

    def lora_layers(self) -> list[str]:
        """What LoRA is kept to on a mixture of experts; nothing on a dense base, where it may cover all."""
        return attention_of_mixture(base_shapes(model_directory(self.model)))

    def exposed(self) -> bool:
        """Whether others than this machine may reach the adapter endpoints."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    def _check(self) -> None:
        for part in self.extra:
            given = part.partition("=")[0].partition(".")[0].replace("_", "-")
            # A long option may be shortened as far as it stays clear.
            broken = [flag for flag in _BREAKS if given == flag or (given.startswith("--") and flag.startswith(given))]
            if broken and given != "--":
                raise SetupError(f"{broken[0]} cannot be given: {_BREAKS[broken[0]]}")
        if self.max_rank not in RANKS:
            raise SetupError(f"max_rank = {self.max_rank}: vLLM takes {', '.join(map(str, RANKS))}")
        if self.batch_loras > self.slots:
            raise SetupError(
                f"batch_loras = {self.batch_loras} is more than slots = {self.slots}: what is in a batch is in memory"
            )


def reasons() -> str:
    """Every fixed flag and variable with its reason, for the help."""
    flags = [(" ".join(flag), why) for flag, why in FLAGS]
    flags += [(f"{MIXTURE_FLAG} …", MIXTURE_WHY)]
    flags += [(f"{' '.join(flag)} (--cpu)", why) for flag, why in CPU_FLAGS]
    flags += [(f"{name}={value}", why) for name, (value, why) in (VARIABLES | CPU_VARIABLES).items()]
    flags += [("PYTHONPATH=… (--cpu)", "a plugin that mends base and experts on the CPU")]
    flags += [(f"never {flag}", why) for flag, why in _BREAKS.items()]
    return "\n".join(f"  {flag}\n      {why}" for flag, why in flags)
