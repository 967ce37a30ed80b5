"""What an adapter directory may hold and say: the same rules for every engine, without torch."""

import json
from collections.abc import Iterable, Set
from typing import Any

from app.base_modules import is_mixture, mixes_tokens
from app.engines.base import Adapter
from app.errors import AdapterRejected

MAX_RANK = 512  # vLLM's largest: what is published must load in both engines
_PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
# What turns an adapter into more than low-rank updates of the base's own layers. vLLM refuses it too.
_REFUSED_OPTIONS = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication")
_PLAIN_INIT = (True, False, "gaussian", "orthogonal", "eva")  # the others (PiSSA, OLoRA, …) change the base


def some(keys: list[str]) -> str:
    """The first three of many names."""
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def require_slot(adapter: Adapter, loaded: Set[int], slots: int) -> None:
    """Raises AdapterRejected where every slot of an engine is taken."""
    if len(loaded) >= slots:
        raise AdapterRejected(
            f"{adapter.name}: all {slots} adapter slots are taken by {sorted(loaded)}; unload one first."
        )


def read_options(adapter: Adapter) -> dict[str, Any]:
    """An adapter's adapter_config.json, if it is a plain LoRA adapter in safetensors.

    Raises AdapterRejected with the reason.
    """
    if not adapter.path.is_dir():
        raise AdapterRejected(f"{adapter.name}: there is no directory {adapter.path}.")
    pickles = [path.name for path in adapter.path.iterdir() if path.suffix in _PICKLES]
    if pickles:
        raise AdapterRejected(f"{adapter.name} holds {pickles[0]}, which may be a pickle; only safetensors are read.")
    try:
        options: dict[str, Any] = json.loads((adapter.path / "adapter_config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterRejected(f"{adapter.name} cannot be read: {error}") from error
    _check_options(adapter, options)
    return options


def require_attention_on_mixture(
    adapter: Adapter, options: dict[str, Any], tensors: Iterable[str], base: Iterable[str]
) -> None:
    """Raises AdapterRejected for an adapter on more than attention where the base is a mixture of experts.

    vLLM loads adapters on experts or router, and then serves some wrong by nats and ignores others.

    Args:
        tensors: the names of the adapter's tensors.
        base: the names of the base's tensors, as files or modules have them.
    """
    if not is_mixture(base):
        return
    outside = [name for name in tensors if not mixes_tokens(name)] or list(options.get("target_parameters") or ())
    if outside:
        raise AdapterRejected(
            f"{adapter.name} covers {some(sorted(outside))}; the policy's LoRA on a mixture of experts covers "
            "attention only."
        )


def _check_options(adapter: Adapter, options: dict[str, Any]) -> None:
    kind = options.get("peft_type") if isinstance(options, dict) else None
    if kind != "LORA":
        raise AdapterRejected(f"{adapter.name} is of type {kind}; only LORA can be served.")
    for option in _REFUSED_OPTIONS:
        if options.get(option):
            raise AdapterRejected(f"{adapter.name} has {option} = {options[option]}, which cannot be served.")
    if options.get("bias", "none") != "none":
        raise AdapterRejected(f'{adapter.name} has bias = {options["bias"]}; only "none" can be served.')
    init = options.get("init_lora_weights", True)
    if init not in _PLAIN_INIT:
        raise AdapterRejected(f"{adapter.name} has init_lora_weights = {init}, which changes the base's weights.")
    rank = options.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise AdapterRejected(f"{adapter.name} has rank {rank}; it must be from 1 to {MAX_RANK}.")
