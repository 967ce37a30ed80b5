"""Learning on a mixture of experts: the policy's LoRA on attention, the critic on experts, the router as it was."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.errors import SetupError
from learner import checkpoint
from learner.critic import FullCritic
from learner.rollouts import Rollout
from learner.trainer import Trainer
from tests.builders import changed, new_trainer, perturb, recorded, same, snapshot, turn
from tests.mixture import ATTENTION, write_mixture

FORMS = pytest.mark.parametrize("form", ["lora", "full"])
IDS = torch.arange(40) * 71 % 3000
POSITIONS = torch.tensor([2, 3, 6, 39])
LAYERS, EXPERTS, RANK = 2, 8, 8


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


def weights(mixture: Path) -> dict[str, Tensor]:
    """The base's weights, read without the code under test."""
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(trainer: Trainer, updates: int) -> None:
    """Updates with rewards that keep moving."""
    asked = turn((5, 6, 7, 8), (300, 41, 900, 77, 12))
    for number in range(updates):
        trainer.update([Rollout("s", (recorded(trainer.policy, asked),), float(number % 3))])


def covered(names: Mapping[str, Tensor]) -> set[str]:
    """The modules of the first layer that adapter tensors belong to."""
    first = "base_model.model.model.layers.0."
    return {name.removeprefix(first).split(".lora_")[0] for name in names if name.startswith(first)}


def test_all_linear_is_attention(mixture: Path) -> None:
    """The default covers every linear layer of attention; not experts, not the router, both of which peft takes in."""
    state = new_trainer(model=mixture).policy.state()
    assert covered(state) == {f"self_attn.{name}" for name in ATTENTION}
    assert len(state) == LAYERS * len(ATTENTION) * 2


def test_layers_of_attention_can_be_named(mixture: Path) -> None:
    """By the names that peft takes."""
    state = new_trainer(model=mixture, target_modules="q_proj, self_attn.v_proj").policy.state()
    assert covered(state) == {"self_attn.q_proj", "self_attn.v_proj"}


@pytest.mark.parametrize(
    "name", ["gate_proj", "up_proj", "down_proj", "gate", "mlp.gate", "experts", "lm_head", "embed_tokens", "nothing"]
)
def test_a_policy_on_more_than_attention_is_an_error_that_names_it(mixture: Path, name: str) -> None:
    """The message gives the layers to choose from."""
    with pytest.raises(SetupError, match=f"'{name}'.*{', '.join(ATTENTION)}") as caught:
        new_trainer(model=mixture, target_modules=f"q_proj,{name}")
    assert caught.value.param == "target_modules"


def test_full_critic_moves_experts_and_head_only(mixture: Path) -> None:
    """After 20 updates every expert tensor and the head moved; attention, router, norms and embeddings did not."""
    trainer = new_trainer(model=mixture, critic="full")
    assert isinstance(trainer.critic, FullCritic)
    train(trainer, 20)
    base = {name.removeprefix("model."): tensor for name, tensor in weights(mixture).items()}
    moved, frozen = trainer.critic.backbone_parameters(), snapshot(trainer.critic.frozen_parameters())
    assert len(moved) == LAYERS * 2
    assert all(".mlp.experts." in name for name in moved)
    assert changed(snapshot(moved), {name: base[name] for name in moved}) == moved.keys()
    assert same(frozen, {name: base[name] for name in frozen})
    assert {"layers.0.mlp.gate.weight", "layers.1.self_attn.q_proj.weight"} < frozen.keys()
    assert all(torch.count_nonzero(p) for p in trainer.critic.head.parameters())


def test_lora_critic_moves_its_adapter_on_experts_and_head_only(mixture: Path) -> None:
    """After 20 updates every tensor that trains moved; the base below, attention and router included, has its bits."""
    trainer = new_trainer(model=mixture)
    start = snapshot(trainer.critic.parameters())
    train(trainer, 20)
    parameters = snapshot(trainer.critic.parameters())
    adapters = [name for name in parameters if not name.startswith("head.")]
    assert len(adapters) == LAYERS * 2 * 2
    assert all(".mlp.experts." in name for name in adapters)
    assert changed(start, parameters) == parameters.keys()
    named = trainer.policy.causal_lm.named_parameters()
    below = {name.replace(".base_layer", ""): p.detach() for name, p in named if ".lora_" not in name}
    assert same(below, weights(mixture))


def test_lora_critics_values_and_gradients_are_those_of_merged_experts(mixture: Path) -> None:
    """Against float64 autograd through base + scale * B A, expert by expert, in transformers' loop over experts."""
    trainer = new_trainer(model=mixture)
    perturb(trainer)
    critic = trainer.critic
    pull = torch.linspace(-1, 1, len(POSITIONS))
    values = critic.values(IDS, POSITIONS)
    (values * pull).sum().backward()

    plain = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float64, experts_implementation="eager").eval()
    factors = {n: p.detach().double().requires_grad_() for n, p in critic.backbone_parameters().items()}
    merged = dict(plain.named_parameters())
    for layer in range(LAYERS):
        experts = f"model.layers.{layer}.mlp.experts"
        # peft nests one wrapper in the other, in the order of the sorted names.
        for wrapper, leaf in ((experts, "down_proj"), (f"{experts}.base_layer", "gate_up_proj")):
            a, b = (factors[f"base_model.model.{wrapper}.lora_{side}.critic.weight"] for side in "AB")
            delta = torch.stack(
                [b[:, e::EXPERTS] @ a[e * RANK : (e + 1) * RANK] for e in range(EXPERTS)]  # as peft lays them out
            )
            scale = trainer.settings.lora_alpha / RANK
            merged[f"{experts}.{leaf}"] = merged[f"{experts}.{leaf}"].detach() + scale * delta
    call = {"input_ids": IDS[None], "output_hidden_states": True, "use_cache": False}
    hidden = torch.func.functional_call(plain, merged, kwargs=call).hidden_states[-1][0]
    head = critic.head.weight[0].detach().double()
    expected = hidden[POSITIONS - 1] @ head + critic.head.bias.item()
    torch.testing.assert_close(values.double(), expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((expected * pull.double()).sum(), list(factors.values()))
    for (name, parameter), gradient in zip(critic.backbone_parameters().items(), gradients, strict=True):
        assert parameter.grad is not None
        assert float(gradient.abs().max()) > 1e-3
        gap = (parameter.grad.double() - gradient).abs().max() / gradient.abs().max()
        assert float(gap) < 1e-5, name


@FORMS
@pytest.mark.parametrize("name", ["gate", "self_attn"])
def test_a_critic_on_router_or_attention_is_an_error_that_names_it(mixture: Path, form: str, name: str) -> None:
    """Neither can be trained, also where it is asked for beside the experts."""
    with pytest.raises(SetupError, match=name) as caught:
        new_trainer(model=mixture, critic=form, critic_modules=("experts", name))
    assert caught.value.param == "critic_modules"


@FORMS
@torch.no_grad()
def test_policy_and_critic_do_not_depend_on_each_other(mixture: Path, form: str) -> None:
    """Whatever one has learned, the other's outputs keep their bits; the base's too."""
    trainer = new_trainer(model=mixture, critic=form)
    perturb(trainer)
    policy, critic = trainer.policy, trainer.critic
    logits, base_logits = policy.logits(IDS, POSITIONS), policy.base_logits(IDS, POSITIONS)
    for parameter in critic.parameters().values():
        parameter.add_(0.5)
    values = critic.values(IDS, POSITIONS)
    assert torch.equal(policy.logits(IDS, POSITIONS), logits)
    for parameter in policy.parameters().values():
        parameter.add_(0.5)
    assert torch.equal(critic.values(IDS, POSITIONS), values)
    assert torch.equal(policy.base_logits(IDS, POSITIONS), base_logits)
    assert not torch.equal(policy.logits(IDS, POSITIONS), logits)


@FORMS
def test_a_resumed_trainer_goes_on_with_the_same_bytes(mixture: Path, tmp_path: Path, form: str) -> None:
    """A checkpoint holds all that trains: 3 updates, a restart and 3 more end as 6 updates do."""
    through = new_trainer(model=mixture, critic=form)
    train(through, 3)
    checkpoint.write(tmp_path / "1", through, str(mixture), {})
    resumed = new_trainer(model=mixture, critic=form, seed=0)
    checkpoint.read_trainer(tmp_path / "1", resumed)
    for trainer in (through, resumed):
        train(trainer, 3)
    first, second = (checkpoint.serialize(trainer, str(mixture), {}) for trainer in (through, resumed))
    assert {name for name in first if first[name] != second[name]} == set()
