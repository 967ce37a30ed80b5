"""The ablation's other estimator, against numbers computed by hand, and its padding."""

from random import Random

import pytest
import torch

from learner.rollouts import Rollout
from learner.study.agent_task import Call
from learner.study.skip_observation import PADDING, ObservationInside, gae_through_observations, padded_tool
from tests.builders import new_trainer, turn


def test_observations_inside_are_steps() -> None:
    """An observation between two actions, lambda = 1 - 1 / (1.5 * 3) = 7/9 and the reward on the last.

    Backwards: 1 - .4 = .6; (.4 - .2) + 7/9 * .6 = 2/3, the observation's; (.2 - .5) + 7/9 * 2/3 = .2185185.
    """
    advantages = gae_through_observations(
        torch.tensor([0.5, 0.2, 0.4]), torch.tensor([0.0, 1.0]), torch.tensor([True, False, True]), 1.0, 1.5
    )
    assert advantages.tolist() == pytest.approx([0.2185185, 0.6])


def test_a_tool_result_costs_steps() -> None:
    """Two turns of two tokens with three tokens between them: the first two lie six and five steps before the reward.

    The fresh critic values everything at 0, so that an advantage is the reward times lambda for each step to it.
    """
    plain = new_trainer()
    trainer = ObservationInside(plain.policy, plain.critic, plain.settings, (0.0, 1.0), lambda: 0.0)
    turns = (turn((1, 2), (3, 4)), turn((1, 2, 3, 4, 5, 6, 7), (8, 9), reward=1.0))
    prepared = trainer._prepare(Rollout("s", turns, 0.0))
    lam = 1 - 1 / (1.5 * 7)
    assert prepared.advantages.tolist() == pytest.approx([lam**6, lam**5, lam, 1.0])
    assert prepared.targets.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_padding_goes_before_the_result() -> None:
    """The result stays what the tool says; the lengths differ and none is above the limit."""
    tool = padded_tool(Random(1))
    results = [tool(Call("call_0", "calculator", '{"expression": "12 + 30"}')) for _ in range(50)]
    assert {result.strip() for result in results} == {"42"}
    assert len({len(result) for result in results}) > 10
    assert max(len(result) for result in results) <= PADDING + len("42")
