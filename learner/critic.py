"""The attention-frozen critic: only MLP (or expert) projections and a zero-initialised scalar head train."""

import copy
import logging
from abc import ABC, abstractmethod
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.base_modules import is_mixture, mixes_tokens, routes
from app.errors import SetupError
from learner.models import Policy, check_fit, seeded
from learner.settings import TrainingSettings

CRITIC = "critic"

log = logging.getLogger(__name__)


class Critic(ABC):
    """V(a_t): the value of the prefix before each action token."""

    head: nn.Linear

    @abstractmethod
    def hidden(self, ids: Tensor) -> Tensor:
        """The last hidden states of one sequence [T], [T, H]."""

    @abstractmethod
    def backbone_parameters(self) -> dict[str, nn.Parameter]:
        """What trains beside the head, by name, in a fixed order."""

    def values(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Values of the prefixes before the tokens at `positions` ([A]) of `ids` ([T]), [A]."""
        return self.head(self.hidden(ids)[positions - 1])[:, 0]

    def parameters(self) -> dict[str, nn.Parameter]:
        head = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        return {**self.backbone_parameters(), **head}

    def state(self) -> dict[str, Tensor]:
        """All that trains, the head included (peft's own save set would drop it)."""
        return {name: p.detach().cpu().contiguous().clone() for name, p in sorted(self.parameters().items())}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises SetupError where a checkpoint's tensors are not exactly this critic's."""
        parameters = self.parameters()
        check_fit("critic", parameters, state)
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


class LoraCritic(Critic):
    """Shares the policy's frozen base, with an own adapter on the MLP projections or on the experts [ours].

    peft adds the adapter to all experts of a layer before they compute, so that an update takes the memory of a
    second set of experts, as the `full` form does; what the optimizer and the checkpoint hold stays small.
    """

    def __init__(self, policy: Policy, settings: TrainingSettings) -> None:
        self._policy = policy
        layers, experts = _lora_targets(policy.causal_lm, settings)
        config = LoraConfig(
            r=settings.critic_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=0.0,
            target_modules=layers,
            target_parameters=experts,
            task_type="CAUSAL_LM",
        )
        with seeded(settings.seed + 1):
            policy.peft.add_adapter(CRITIC, config)
        policy.peft.eval()
        self.head = _zero_head(policy.causal_lm)
        _log_trainable(self, policy.causal_lm)

    def hidden(self, ids: Tensor) -> Tensor:
        self._policy.activate(CRITIC)
        return _last_hidden(self._policy.causal_lm.get_decoder(), ids)

    def backbone_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._policy.peft.named_parameters() if f".{CRITIC}." in name}


class FullCritic(Critic):
    """An own copy of the backbone with attention frozen (the paper's form)."""

    def __init__(self, base: PreTrainedModel, settings: TrainingSettings) -> None:
        self._decoder = copy.deepcopy(base.get_decoder())
        names = [name for name, _ in self._decoder.named_parameters()]
        self._trainable = frozenset(_matching(names, settings))
        for name, parameter in self._decoder.named_parameters():
            parameter.requires_grad_(name in self._trainable)
        self.head = _zero_head(base)
        _log_trainable(self, self._decoder)

    def hidden(self, ids: Tensor) -> Tensor:
        return _last_hidden(self._decoder, ids)

    def backbone_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._decoder.named_parameters() if name in self._trainable}

    def frozen_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._decoder.named_parameters() if name not in self._trainable}


def make_policy_and_critic(base: PreTrainedModel, settings: TrainingSettings) -> tuple[Policy, Critic]:
    """Both models over one base; the `full` critic copies the base before the policy's adapter goes in."""
    if settings.critic == "full":
        critic = FullCritic(base, settings)
        return Policy(base, settings), critic
    policy = Policy(base, settings)
    return policy, LoraCritic(policy, settings)


def _lora_targets(model: nn.Module, settings: TrainingSettings) -> tuple[list[str], list[str] | None]:
    """Linear layers, or on a mixture the experts: one parameter [experts, out, in] a projection."""
    parameters = dict(model.named_parameters())
    if is_mixture(parameters):
        experts = [name for name, parameter in parameters.items() if parameter.dim() == 3]
        return [], _matching(experts, settings)
    linear = [n for n, m in model.named_modules() if isinstance(getattr(m, "base_layer", m), nn.Linear)]
    names = [name for name in linear if "lora_" not in name and "base_layer" not in name]
    return _matching(names, settings), None


def _matching(names: list[str], settings: TrainingSettings) -> list[str]:
    """The names inside a module that `critic_modules` names; each pattern must match, and no token mixer may."""
    if is_mixture(names):
        # A router that moves sends tokens to experts that have not learned from them: training becomes unstable.
        names = [name for name in names if not routes(name)]
    parts = {name: frozenset(name.split(".")) for name in names}
    for pattern in settings.critic_modules:
        if not any(pattern in p for p in parts.values()):
            known = sorted({part for p in parts.values() for part in p if not part.isdigit()})
            raise SetupError(
                f"critic_modules: {pattern!r} matches nothing in this model that a critic of the form "
                f"{settings.critic!r} can train; its module names are {', '.join(known)}",
                param="critic_modules",
            )
    wanted = frozenset(settings.critic_modules)
    chosen = [name for name in names if parts[name] & wanted]
    mixed = [name for name in chosen if mixes_tokens(name)]
    if mixed:
        raise SetupError(
            f"critic_modules: {mixed[0]} belongs to a token mixer, which SAO keeps frozen; name MLP or expert modules",
            param="critic_modules",
        )
    return chosen


def _zero_head(model: Any) -> nn.Linear:
    head = nn.Linear(int(model.config.get_text_config().hidden_size), 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _last_hidden(decoder: Any, ids: Tensor) -> Tensor:
    return decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0].float()


def _log_trainable(critic: Critic, model: nn.Module) -> None:
    parameters = critic.parameters()
    trained = sum(p.numel() for p in parameters.values())
    total = sum(p.numel() for p in model.parameters())
    kinds = ("proj", "experts", "head")
    modules = sorted({part for name in parameters for part in name.split(".") if part.endswith(kinds)})
    log.info("critic trains %s: %d of %d weights (%.1f %%)", ", ".join(modules), trained, total, 100 * trained / total)
