"""The attention-frozen critic: what trains, what does not, and what a value is conditioned on."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from app.errors import SetupError
from app.settings import TINY_MODEL
from learner.critic import FullCritic
from learner.models import Policy, load_base
from learner.rollouts import Rollout
from learner.settings import TrainingSettings
from learner.trainer import Trainer
from tests.builders import changed, new_trainer, perturb, recorded, same, snapshot, turn

FORMS = pytest.mark.parametrize("form", ["lora", "full"])
IDS = torch.tensor([5, 17, 260, 33, 900, 41, 7])
POSITIONS = torch.tensor([2, 3, 6])


def _base_weights() -> dict[str, Tensor]:
    """The shipped weights, read without the code under test."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _train(trainer: Trainer, updates: int) -> None:
    """Updates with rewards that keep moving, so that neither model stands still."""
    asked = turn((5, 6, 7, 8), (300, 41, 900), reward=0.0)
    for number in range(updates):
        trainer.update([Rollout("s", (recorded(trainer.policy, asked),), float(number % 3))])


def _base_in_peft(trainer: Trainer) -> dict[str, Tensor]:
    """The weights below the adapters, under the base's own names."""
    named = trainer.policy.causal_lm.named_parameters()
    return {name.replace(".base_layer", ""): p.detach() for name, p in named if ".lora_" not in name}


def _attention(names: Iterator[str] | set[str]) -> list[str]:
    return [name for name in names if ".self_attn." in name]


@FORMS
def test_values_start_at_zero(form: str) -> None:
    """The head starts at zero, whatever the backbone says."""
    critic = new_trainer(critic=form).critic
    assert critic.values(IDS, POSITIONS).tolist() == [0.0, 0.0, 0.0]
    assert all(torch.count_nonzero(p) == 0 for p in critic.head.parameters())


@FORMS
def test_value_is_of_the_prefix_before_the_token(form: str) -> None:
    """V(a_t) is the head on the last hidden state of ids[:t], computed from that prefix alone."""
    trainer = new_trainer(critic=form)
    perturb(trainer)
    critic = trainer.critic
    with torch.no_grad():
        expected = [float(critic.head(critic.hidden(IDS[:t])[-1])) for t in POSITIONS]
        got = critic.values(IDS, POSITIONS).tolist()
    assert got == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in got}) == 3


def test_lora_critic_without_its_adapter_is_the_base() -> None:
    """A fresh critic adapter (B = 0) leaves the base's last hidden states as they are."""
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    with torch.no_grad():
        expected = base.model(input_ids=IDS[None]).last_hidden_state[0]
        got = new_trainer(critic="lora").critic.hidden(IDS)
    torch.testing.assert_close(got, expected)


@FORMS
def test_values_do_not_depend_on_the_policys_adapter(form: str) -> None:
    """Whatever the policy has learned, the critic reads the base and its own weights."""
    trainer = new_trainer(critic=form)
    perturb(trainer)
    with torch.no_grad():
        before = trainer.critic.values(IDS, POSITIONS)
        for parameter in trainer.policy.parameters().values():
            parameter.add_(0.5)
        assert torch.equal(trainer.critic.values(IDS, POSITIONS), before)


@FORMS
def test_policy_does_not_depend_on_the_critic(form: str) -> None:
    """Whatever the critic has learned, the policy's and the base's logits stay."""
    trainer = new_trainer(critic=form)
    perturb(trainer)
    policy = trainer.policy
    with torch.no_grad():
        before = policy.logits(IDS, POSITIONS), policy.base_logits(IDS, POSITIONS)
        for parameter in trainer.critic.parameters().values():
            parameter.add_(0.5)
        trainer.critic.values(IDS, POSITIONS)
        assert torch.equal(policy.base_logits(IDS, POSITIONS), before[1])
        assert torch.equal(policy.logits(IDS, POSITIONS), before[0])
    assert not torch.equal(before[0], before[1])


def test_base_logits_are_the_plain_models() -> None:
    """With the adapter disabled the logits are those of the shipped model, at the places before the tokens."""
    trainer = new_trainer()
    perturb(trainer)
    plain = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    with torch.no_grad():
        expected = plain(input_ids=IDS[None]).logits[0, POSITIONS - 1]
    torch.testing.assert_close(trainer.policy.base_logits(IDS, POSITIONS), expected)


def test_full_critic_keeps_attention_and_moves_mlp_and_head() -> None:
    """After 50 updates attention, norms and embeddings have the base's bits; every MLP weight and the head moved."""
    trainer = new_trainer(critic="full")
    assert isinstance(trainer.critic, FullCritic)
    base = {name.removeprefix("model."): p for name, p in _base_weights().items()}
    _train(trainer, 50)
    frozen = {name: p.detach() for name, p in trainer.critic.frozen_parameters().items()}
    moved = trainer.critic.backbone_parameters()
    assert len(_attention(set(frozen))) == 4 * 6
    assert same(frozen, {name: base[name] for name in frozen})
    assert moved.keys() == {name for name in base if ".mlp." in name}
    assert len(moved) == 4 * 3
    assert changed(base, {**base, **snapshot(moved)}) == moved.keys()
    assert frozen.keys() | moved.keys() == base.keys() - {"lm_head.weight"}
    assert all(torch.count_nonzero(p) for p in trainer.critic.head.parameters())


def test_lora_critic_keeps_the_base_and_moves_its_mlp_adapter_and_head() -> None:
    """After 50 updates the shared base has its bits; the critic's adapters are on MLP projections only, and moved."""
    trainer = new_trainer(critic="lora")
    start = snapshot(trainer.critic.parameters())
    _train(trainer, 50)
    assert same(_base_in_peft(trainer), _base_weights())
    parameters = trainer.critic.parameters()
    adapters = {name for name in parameters if not name.startswith("head.")}
    assert len(adapters) == 4 * 3 * 2
    assert all(".mlp." in name for name in adapters)
    every = [name for name, _ in trainer.policy.peft.named_parameters() if ".critic." in name]
    assert _attention(set(every)) == []
    assert changed(start, snapshot(parameters)) == parameters.keys()


def test_full_critic_does_not_share_weights_with_the_policys_base() -> None:
    """The `full` critic trains a copy; the policy's base keeps the shipped bits."""
    trainer = new_trainer(critic="full")
    _train(trainer, 2)
    assert same(_base_in_peft(trainer), _base_weights())


@FORMS
def test_only_the_listed_parameters_can_get_a_gradient(form: str) -> None:
    """A value's gradient reaches exactly what `parameters()` lists."""
    trainer = new_trainer(critic=form)
    perturb(trainer)
    trainer.critic.values(IDS, POSITIONS).sum().backward()
    listed = trainer.critic.parameters()
    assert all(p.grad is not None and torch.count_nonzero(p.grad) for p in listed.values())
    reached = [p for p in trainer.policy.peft.parameters() if p.grad is not None]
    if isinstance(trainer.critic, FullCritic):
        reached += [p for p in trainer.critic.frozen_parameters().values() if p.grad is not None]
    allowed = {id(p) for p in listed.values()}
    assert all(id(p) in allowed for p in reached)


@FORMS
def test_pattern_that_matches_nothing_is_an_error_that_names_it(form: str) -> None:
    """A mistaken module name would leave nothing to train; the message shows the model's own names."""
    with pytest.raises(SetupError) as caught:
        new_trainer(critic=form, critic_modules=("mlp", "feed_forward"))
    assert caught.value.param == "critic_modules"
    assert "'feed_forward'" in str(caught.value)
    assert "mlp" in str(caught.value).split("module names are")[1]


@FORMS
@pytest.mark.parametrize("pattern", ["self_attn", "q_proj", "layers"])
def test_pattern_that_reaches_a_token_mixer_is_an_error_that_names_it(form: str, pattern: str) -> None:
    """Attention stays frozen, also where a pattern takes it in with the rest."""
    with pytest.raises(SetupError, match="token mixer") as caught:
        new_trainer(critic=form, critic_modules=("mlp", pattern))
    assert "self_attn" in str(caught.value)
    assert caught.value.param == "critic_modules"


@FORMS
def test_pattern_is_a_whole_module_name(form: str) -> None:
    """`down_proj` trains those projections alone; a part of a name matches nothing."""
    names = new_trainer(critic=form, critic_modules=("down_proj",)).critic.backbone_parameters()
    assert names
    assert all(".down_proj." in name for name in names)
    with pytest.raises(SetupError):
        new_trainer(critic=form, critic_modules=("down",))


@FORMS
def test_state_holds_all_that_trains_and_restores_it(form: str) -> None:
    """The value head is in the state, and another critic with that state gives the same values."""
    trainer = new_trainer(critic=form)
    perturb(trainer)
    state = trainer.critic.state()
    assert {"head.weight", "head.bias"} < state.keys()
    other = new_trainer(critic=form, seed=5)
    other.critic.load_state(state)
    with torch.no_grad():
        assert torch.equal(other.critic.values(IDS, POSITIONS), trainer.critic.values(IDS, POSITIONS))


@FORMS
def test_state_is_a_copy(form: str) -> None:
    """Training after a state was taken does not change it."""
    trainer = new_trainer(critic=form)
    state = trainer.critic.state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    perturb(trainer)
    assert same(state, before)


@pytest.mark.parametrize("odd", ["head.bias", "head.more"])
def test_state_with_other_keys_is_refused_with_the_key(odd: str) -> None:
    """A missing or an unknown tensor is named, and nothing is half loaded."""
    critic = new_trainer().critic
    before = snapshot(critic.parameters())
    state = {name: tensor + 1 for name, tensor in critic.state().items()}
    if odd in state:
        del state[odd]
    else:
        state[odd] = torch.zeros(1)
    with pytest.raises(SetupError, match=odd):
        critic.load_state(state)
    assert same(snapshot(critic.parameters()), before)


def test_seed_decides_the_initial_adapters() -> None:
    """The same seed gives the same weights and another seed others, whatever the global generator says."""
    torch.manual_seed(3)
    first, again, other = (new_trainer(seed=seed) for seed in (1, 1, 2))
    for owner in ("policy", "critic"):
        weights = [snapshot(getattr(trainer, owner).parameters()) for trainer in (first, again, other)]
        assert same(weights[0], weights[1])
        assert changed(weights[0], weights[2]) == {name for name in weights[0] if ".lora_A." in name}


def test_policy_gives_the_global_generator_back_as_it_was() -> None:
    """peft draws initial weights from the global generator; who seeded it draws the same numbers afterwards."""
    base = load_base(str(TINY_MODEL))
    torch.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    Policy(base, TrainingSettings())
    assert torch.equal(torch.rand(2), drawn)


def test_nothing_drops_out() -> None:
    """Dropout in the trainer would put tokens out of band: every module is in evaluation mode."""
    for form in ("lora", "full"):
        trainer = new_trainer(critic=form)
        _train(trainer, 1)
        modules: list[nn.Module] = list(trainer.policy.peft.modules())
        assert not any(module.training and list(module.children()) for module in modules)
        with torch.no_grad():
            first, second = (trainer.policy.logits(IDS, POSITIONS) for _ in range(2))
        assert torch.equal(first, second)


def test_base_that_cannot_be_loaded_is_a_setup_error_that_names_it() -> None:
    """A wrong model setting says which."""
    with pytest.raises(SetupError, match="/nowhere/model") as caught:
        load_base("/nowhere/model")
    assert caught.value.param == "model"
