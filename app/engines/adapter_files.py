"""Adapter directories: read, and refuse with the reason what an engine would misapply or silently ignore."""

import json
from collections.abc import Mapping

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.engines.adapter_options import read_options, require_attention_on_mixture, some
from app.engines.base import Adapter
from app.errors import AdapterRejected


class AdapterReader:
    """Reads adapters for one base model.

    Versions of a policy share a configuration, so what a configuration's tensors must be is found once.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._config = base.config
        self._names = [name for name, _ in base.named_parameters()]
        self._shapes: dict[str, Mapping[str, torch.Size]] = {}

    def read(self, adapter: Adapter) -> tuple[LoraConfig, dict[str, Tensor]]:
        """The adapter's configuration and tensors; raises AdapterRejected with the reason."""
        options = read_options(adapter)
        config, tensors = _read_adapter(adapter)
        require_attention_on_mixture(adapter, options, tensors, self._names)
        key = json.dumps(config.to_dict(), sort_keys=True, default=_plain)
        if key not in self._shapes:
            self._shapes[key] = self._rehearse(adapter, config)
        _compare(adapter, tensors, self._shapes[key])
        return config, tensors

    def _rehearse(self, adapter: Adapter, config: LoraConfig) -> Mapping[str, torch.Size]:
        """Let peft build the adapter on a copy of the model without weights; the shapes of its tensors.

        peft itself ignores tensors that it has no place for, and cannot take back an adapter that fails half-way.
        """
        try:
            with torch.device("meta"):
                copy = get_peft_model(AutoModelForCausalLM.from_config(self._config), config)
        except (ValueError, TypeError) as error:
            raise AdapterRejected(f"{adapter.name} does not fit the base model: {error}") from error
        if any(layer.lora_variant for layer in copy.modules() if isinstance(layer, LoraLayer)):
            raise AdapterRejected(f"{adapter.name} is no plain LoRA adapter.")
        return {k: v.shape for k, v in get_peft_model_state_dict(copy, save_embedding_layers=False).items()}


def _compare(adapter: Adapter, tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    problems = {
        "unknown tensors": sorted(tensors.keys() - expected.keys()),
        "missing tensors": sorted(expected.keys() - tensors.keys()),
        "tensors of another shape": [k for k in tensors if tensors[k].shape != expected.get(k, tensors[k].shape)],
        "tensors with values that are not finite": [k for k, v in tensors.items() if not v.isfinite().all()],
    }
    for problem, keys in problems.items():
        if keys:
            raise AdapterRejected(f"{adapter.name} has {problem}: {some(keys)}.")
    if not any(v.any() for k, v in tensors.items() if ".lora_B." in k):
        raise AdapterRejected(f"{adapter.name} changes nothing: every LoRA B is zero.")


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)


def _read_adapter(adapter: Adapter) -> tuple[LoraConfig, dict[str, Tensor]]:
    try:
        config = LoraConfig.from_pretrained(str(adapter.path))
        return config, load_file(adapter.path / "adapter_model.safetensors")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise AdapterRejected(f"{adapter.name} cannot be read: {error}") from error
