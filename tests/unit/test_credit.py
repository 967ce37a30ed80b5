"""Credit in an episode: advantages and value targets worked out by hand, and what observation tokens get: nothing.

The stub critic says .2, .4, .6 and .8 before the four action tokens 10, 11, 12 and 13, whatever stands before them.
With gamma 1 and lambda 1/2 (1 - 1 / (.5 * 4)), a reward of .5 for the turn of token 12 and 1 for the session:

    t   u    V    delta_t = u_t + V_t+1 - V_t    A_t = delta_t + A_t+1 / 2    target = rewards from t on
    3   1    .8   1 - .8       =  .2              .2                          1
    2   .5   .6   .5 + .8 - .6 =  .7              .7 + .1  = .8               1.5
    1   0    .4   .6 - .4      =  .2              .2 + .4  = .6               1.5
    0   0    .2   .4 - .2      =  .2              .2 + .3  = .5               1.5
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from learner import sao
from learner.critic import Critic
from learner.models import Policy
from learner.rollouts import Rollout, Turn, pack
from learner.settings import TrainingSettings
from learner.trainer import Trainer
from tests.builders import new_trainer, perturb, recorded, turn

VALUES = {10: 0.2, 11: 0.4, 12: 0.6, 13: 0.8}
WRONG = 100.0  # before every other token: whatever reads it is far off
ADVANTAGES = [0.5, 0.6, 0.8, 0.2]
TARGETS = [1.5, 1.5, 1.5, 1.0]
SETTINGS: dict[str, Any] = {"lambda_alpha": 0.5, "negative_scale": 1.0, "critic_steps": 1}

SEARCH = turn((1, 2), (10, 11))
READ = turn((1, 2, 10, 11, 7, 7, 7), (12,), reward=0.5)
REPLY = turn((1, 2, 10, 11, 7, 7, 7, 12, 8, 8), (13,))


class _StubCritic(Critic):
    """A value for each token that could come next, whatever the context."""

    def __init__(self) -> None:
        self.head = nn.Linear(1, 1)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def hidden(self, ids: Tensor) -> Tensor:
        return torch.tensor([[VALUES.get(token, WRONG)] for token in [*ids[1:].tolist(), -1]])

    def backbone_parameters(self) -> dict[str, nn.Parameter]:
        return {}


@dataclass(frozen=True, slots=True)
class _Credit:
    """What an update's losses were given for each action token, in time order."""

    advantages: list[float]
    targets: list[float]
    sequences: int


@pytest.fixture(scope="module")
def policy() -> Policy:
    return new_trainer().policy


@pytest.fixture
def credit(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Credit]:
    """Runs an update with the stub critic and looks at the losses that it takes."""
    given: dict[str, list[Tensor]] = defaultdict(list)
    policy_loss, critic_loss = sao.policy_loss, sao.critic_loss

    def seen_policy_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *rest: Any) -> Tensor:
        given["advantages"].append(advantages)
        return policy_loss(logprobs, behaviour, advantages, *rest)

    def seen_critic_loss(values: Tensor, targets: Tensor, total: int) -> Tensor:
        given["targets"].append(targets)
        return critic_loss(values, targets, total)

    monkeypatch.setattr(sao, "policy_loss", seen_policy_loss)
    monkeypatch.setattr(sao, "critic_loss", seen_critic_loss)

    def run(turns: Sequence[Turn], session_reward: float, **settings: Any) -> _Credit:
        training = TrainingSettings(**SETTINGS | {"critic_warmup": 1} | settings)
        trainer = Trainer(policy, _StubCritic(), training, (0.0, 1.0), lambda: 0.0)
        trainer.update([Rollout("s", tuple(turns), session_reward)])
        order = torch.cat([s.times for s in pack(turns)]).argsort()
        advantages, targets = (torch.cat(given.pop(name))[order].tolist() for name in ("advantages", "targets"))
        return _Credit(advantages, targets, len(pack(turns)))

    return run


Run = Callable[..., _Credit]


def test_three_turns_with_a_turns_and_a_final_reward(credit: Run) -> None:
    """The table above, for a search, a tool result, a judged turn, another result and the reply."""
    found = credit([SEARCH, READ, REPLY], 1.0)
    assert found.advantages == pytest.approx(ADVANTAGES)
    assert found.targets == pytest.approx(TARGETS)
    assert found.sequences == 1


def test_discount_counts_action_tokens(credit: Run) -> None:
    """gamma 1/2, so gamma lambda 1/4: deltas 0, -.1, .3, .2, however long the observations between them are."""
    found = credit([SEARCH, READ, REPLY], 1.0, gamma=0.5)
    assert found.advantages == pytest.approx([-0.003125, -0.0125, 0.35, 0.2])
    assert found.targets == pytest.approx([0.25, 0.5, 1.0, 1.0])


def test_dropped_thinking_changes_no_credit(credit: Run) -> None:
    """The same session under a template that drops 10 and 12 from later prompts: three sequences, and the same bits."""
    read = replace(READ, prompt_ids=(1, 2, 11, 7, 7, 7))
    reply = replace(REPLY, prompt_ids=(1, 2, 11, 7, 7, 7, 8, 8))
    one, three = credit([SEARCH, READ, REPLY], 1.0), credit([SEARCH, read, reply], 1.0)
    assert (one.sequences, three.sequences) == (1, 3)
    assert (three.advantages, three.targets) == (one.advantages, one.targets)


def test_interleaved_agents_are_credited_in_time_order(credit: Run) -> None:
    """Tokens 10 and 12 of a main agent, 11 and 13 of its helper: two sequences, the numbers of the table."""
    found = credit(
        [turn((1,), (10,)), turn((5,), (11,)), turn((1, 10, 7), (12,), reward=0.5), turn((5, 11, 7, 7), (13,))], 1.0
    )
    assert found.sequences == 2
    assert (found.advantages, found.targets) == (pytest.approx(ADVANTAGES), pytest.approx(TARGETS))


def test_retried_turn_is_credited_in_time_order(credit: Run) -> None:
    """The second turn is asked again: its two answers are two sequences, and one step follows the other."""
    found = credit([SEARCH, READ, replace(REPLY, prompt_ids=READ.prompt_ids)], 1.0)
    assert found.sequences == 2
    assert (found.advantages, found.targets) == (pytest.approx(ADVANTAGES), pytest.approx(TARGETS))


def test_turn_without_action_tokens_costs_no_step(credit: Run) -> None:
    """A served turn that cannot be trained on, judged .5: its reward is the consequence of the token before, 12."""
    served = turn((1, 2, 10, 11, 7, 7, 7, 12, 8), (9, 9), trainable=False, reward=0.5)
    reply = replace(REPLY, prompt_ids=(1, 2, 10, 11, 7, 7, 7, 12, 8, 9, 9, 8))
    found = credit([SEARCH, replace(READ, reward=0.0), served, reply], 1.0)
    assert (found.advantages, found.targets) == (pytest.approx(ADVANTAGES), pytest.approx(TARGETS))


def test_last_turn_without_action_tokens_rewards_the_last_action_token(credit: Run) -> None:
    """The session ends with a turn that cannot be trained on: .75 for it and .25 for the session lie on 13."""
    last = turn((1, 2, 10, 11, 7, 7, 7, 12, 8, 8, 13, 8), (9, 9, 9), trainable=False, reward=0.75)
    found = credit([SEARCH, READ, REPLY, last], 0.25)
    assert (found.advantages, found.targets) == (pytest.approx(ADVANTAGES), pytest.approx(TARGETS))


@pytest.mark.parametrize("form", ["lora", "full"])
def test_observation_tokens_get_no_gradient(form: str) -> None:
    """Of policy and critic: the last hidden states, of which logits and values are made, have a gradient where the next
    token is an action, and exactly 0 where it is an observation or what another sequence trains on.
    """
    trainer = new_trainer(critic=form)
    perturb(trainer)
    turns = [
        turn((5, 6, 7), (300, 41, 900)),
        turn((5, 6, 7, 300, 41, 900, 8, 8, 9), (77, 260), reward=0.5),
        turn((5, 6, 7, 900, 8, 8, 9, 260, 4), (12, 13, 14)),
    ]
    rollout = Rollout("s", tuple(recorded(trainer.policy, t) for t in turns), 1.0)
    expected = {11: [2, 3, 4, 8, 9], 12: [8, 9, 10]}  # the places before action tokens, by the sequence's length
    with _gradients_of_last_hidden_states() as gradients:
        trainer.update([rollout])
    found = [(g.shape[1], g[0].any(dim=-1).nonzero()[:, 0].tolist()) for g in gradients if g.shape[1] in expected]
    both = sorted(expected.items())
    assert len(found) == 2 * (trainer.settings.critic_steps + 1)
    assert sorted(found) == sorted(both * (trainer.settings.critic_steps + 1))


@contextmanager
def _gradients_of_last_hidden_states() -> Iterator[list[Tensor]]:
    """The gradients [1, T, H] of whatever any decoder gives, in the order of the backward passes."""
    gradients: list[Tensor] = []

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        if states is not None and states.requires_grad:
            states.register_hook(gradients.append)

    handle = register_module_forward_hook(watch)
    try:
        yield gradients
    finally:
        handle.remove()
