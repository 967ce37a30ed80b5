"""The LoRA policy over a frozen base."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from app.base_modules import is_mixture, mixes_tokens
from app.errors import SetupError
from learner.settings import TrainingSettings

POLICY = "policy"


def load_base(model: str) -> PreTrainedModel:
    """The frozen base in float32, in evaluation mode: dropout in the trainer puts tokens out of band."""
    try:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SetupError(f"model = {model!r} cannot be loaded: {error}", param="model") from error
    base.requires_grad_(False)
    return base.eval()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """peft draws initial weights from the global generator; it is seeded here and given back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Policy:
    """pi_theta: the base with one LoRA adapter.

    `peft` is shared with the `lora` critic; `active` selects whose adapter is in force.
    """

    def __init__(self, base: PreTrainedModel, settings: TrainingSettings) -> None:
        self.config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=0.0,
            target_modules=_target_modules(settings.target_modules, base),
            task_type="CAUSAL_LM",
        )
        with seeded(settings.seed):
            self.peft: PeftModel = get_peft_model(base, self.config, adapter_name=POLICY)
        self.peft.eval()

    @property
    def causal_lm(self) -> Any:
        return self.peft.base_model.model

    @property
    def hidden_size(self) -> int:
        return int(self.causal_lm.config.get_text_config().hidden_size)

    @property
    def vocabulary(self) -> int:
        return int(self.causal_lm.get_input_embeddings().weight.shape[0])

    @property
    def max_context(self) -> int:
        return int(self.causal_lm.config.get_text_config().max_position_embeddings)

    def changes_base(self) -> bool:
        """Whether any LoRA B is other than zero."""
        return any(bool(p.any()) for name, p in self.parameters().items() if ".lora_B." in name)

    def activate(self, adapter: str) -> None:
        self.peft.set_adapter(adapter)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable weights by name, in a fixed order."""
        return {name: p for name, p in self.peft.named_parameters() if f".{POLICY}." in name}

    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Next-token logits that predict the tokens at `positions` ([A], at least 1) of `ids` ([T]), [A, V]."""
        return self.head(self.hidden(ids, positions))

    def base_logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The same under the base, adapter disabled, without gradient."""
        return self.base_head(self.base_hidden(ids, positions))

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The last hidden states that `head` makes these logits from, [A, H]."""
        self.activate(POLICY)
        return self._hidden(ids, positions)

    def base_hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The same under the base, without gradient."""
        with torch.no_grad(), self.peft.disable_adapter():
            return self._hidden(ids, positions)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of last hidden states [A, H], [A, V]; of a part of them, where all would take too much memory."""
        self.activate(POLICY)
        return self._head(hidden)

    def base_head(self, hidden: Tensor) -> Tensor:
        """The same under the base, without gradient."""
        with torch.no_grad(), self.peft.disable_adapter():
            return self._head(hidden)

    def _hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self.causal_lm.get_decoder()(input_ids=ids[None], use_cache=False)
        return output.last_hidden_state[0, positions - 1]

    def _head(self, hidden: Tensor) -> Tensor:
        """The model's own forward pass without its decoder, since some cap or scale what the output layer gives."""
        decoder = self.causal_lm.get_decoder()
        decoder.forward = lambda **_: MoeModelOutputWithPast(last_hidden_state=hidden[None])
        try:
            return self.causal_lm(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del decoder.forward

    def state(self) -> dict[str, Tensor]:
        """The adapter under peft's own key names, ready for adapter_model.safetensors."""
        return {name: t.detach().cpu().contiguous().clone() for name, t in sorted(self._peft_state().items())}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises SetupError where a checkpoint's tensors are not exactly this adapter's."""
        check_fit("adapter", self._peft_state(), state)
        set_peft_model_state_dict(self.peft, state, adapter_name=POLICY)

    def _peft_state(self) -> dict[str, Tensor]:
        return get_peft_model_state_dict(self.peft, adapter_name=POLICY, save_embedding_layers=False)

    @torch.no_grad()
    def pull_to_base(self, factor: float) -> None:
        """Multiply LoRA B by `factor`: the adapter's effect shrinks, its directions stay [ours]."""
        for name, parameter in self.parameters().items():
            if ".lora_B." in name:
                parameter.mul_(factor)


def check_fit(what: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raises SetupError, naming a tensor, unless names and shapes are the same."""
    shapes, found = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (wanted, given))
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise SetupError(
                f"the checkpoint's {what} does not fit this model and these settings: {name} has shape "
                f"{found.get(name)}, here it is {shapes.get(name)}; set rank, modules and critic as they were"
            )


def _target_modules(setting: str, base: PreTrainedModel) -> str | list[str]:
    names = None if setting == "all-linear" else [name.strip() for name in setting.split(",")]
    if is_mixture(name for name, _ in base.named_modules()):
        return _attention_only(names, base)
    return names or setting


def _attention_only(names: list[str] | None, base: PreTrainedModel) -> list[str]:
    """`names`, or by default every linear layer of a mixture's attention; peft's `all-linear` takes in the experts.

    Raises SetupError for a name that reaches more: engines do not serve LoRA on experts exactly, and a router
    that moves sends tokens to other experts than those that the behaviour logprobs came from.
    """
    modules = dict(base.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and mixes_tokens(name)]
    attention = sorted({name.rpartition(".")[2] for name in linear})
    for name in names or attention:
        reached = [module for module in modules if f".{module}".endswith(f".{name}")]
        if not reached or not all(mixes_tokens(module) for module in reached):
            raise SetupError(
                f"target_modules: {name!r} is no layer of attention alone, and the policy's LoRA on a mixture of "
                f"experts covers attention only; leave `all-linear`, or choose from {', '.join(attention)}",
                param="target_modules",
            )
    return names or attention
