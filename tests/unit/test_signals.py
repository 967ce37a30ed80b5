"""Signals: what a rollout's rewards are when several are named, weighed and scored."""

import pytest

from app.events.schema import BadEvent
from learner.rollouts import build_rollout
from learner.signals import Judgement, Signals
from tests.builders import completion, feedback, score

SIGNALS = Signals({"style": 0.5, "task": 2.0, "length": -0.25, "watched": 0.0}, -1.0, 1.0)


def test_rewards_are_the_weighted_sums_over_the_signals() -> None:
    """By hand: turn a 0.5*0.4 + 2*0.1 - 0.25*0.8 = 0.2, turn b 2*(-1) = -2, the session 0.5*1 + 2*0.5 = 1.5."""
    completions = [completion("s", "a"), completion("s", "b", completion_ids=(9,))]
    judgements: list[Judgement] = [
        feedback("s", "f1", completion_id="a", reward=0.4, final=False, signal="style"),
        feedback("s", "f2", completion_id="a", reward=0.1, final=False, signal="task"),
        feedback("s", "f3", completion_id="b", reward=-1.0, final=False, signal="task"),
        feedback("s", "f4", reward=1.0, signal="style"),
        score("s", "length", turns={"a": 0.8}),
        score("s", "task", session=0.5),
        score("s", "watched", session=1.0, turns={"a": 1.0, "b": 1.0}),
    ]
    rollout = build_rollout("s", completions, judgements, SIGNALS.weights)
    assert [turn.reward for turn in rollout.turns] == pytest.approx([0.2, -2.0])
    assert rollout.session_reward == pytest.approx(1.5)
    assert rollout.token_rewards().tolist() == pytest.approx([0.0, 0.2, -0.5])


def test_signal_that_the_settings_no_longer_name_weighs_nothing() -> None:
    """A judgement may have been waiting while the settings changed."""
    judgements: list[Judgement] = [feedback("s", "f1", reward=1.0, signal="gone"), feedback("s", "f2", signal="task")]
    assert build_rollout("s", [completion()], judgements, SIGNALS.weights).session_reward == 2.0


def test_clients_reward_alone_counts_as_it_is_by_default() -> None:
    """Without settings there is one signal, of weight 1."""
    assert (
        build_rollout("s", [completion()], [feedback("s", "f1", reward=0.3)], Signals().weights).session_reward == 0.3
    )
    assert Signals().combined_range == (0.0, 1.0)


def test_combined_range_adds_the_ends_that_each_weight_allows() -> None:
    """By hand: the lowest is -0.5 - 2 - 0.25; with rewards from 0 to 1 a negative weight lowers, and never raises."""
    assert SIGNALS.combined_range == (-2.75, 2.75)
    assert Signals({"task": 2.0, "length": -0.25}).combined_range == (-0.25, 2.0)


def test_judgements_that_weigh_nothing_are_no_reward() -> None:
    """Not scores without numbers, not signals that are only watched; a reward of 0 is one."""
    assert not SIGNALS.rewarded([])
    assert not SIGNALS.rewarded(
        [score("s", "task"), score("s", "watched", session=1.0), score("s", "gone", session=1.0)]
    )
    assert SIGNALS.rewarded([score("s", "task", session=0.0)])
    assert SIGNALS.rewarded([feedback("s", "f", signal="style", reward=0.0)])


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (feedback("s", "f", signal="stile"), ["signal", "'stile'", "style, task"]),
        (score("s", "judge", session=1.0), ["signal", "'judge'", "style, task"]),
        (feedback("s", "f", signal="task", reward=1.5), ["reward", "1.5", "-1 to 1"]),
        (score("s", "task", turns={"a": -1.5}), ["reward", "-1.5", "-1 to 1"]),
    ],
    ids=["unknown feedback", "unknown score", "feedback out of range", "score out of range"],
)
def test_judgements_that_the_policy_does_not_take_are_refused(event: Judgement, words: list[str]) -> None:
    """The dead letter's reason names the field, the value and what would be right."""
    with pytest.raises(BadEvent) as refused:
        SIGNALS.check(event)
    for word in words:
        assert word in str(refused.value)


def test_judgements_inside_the_range_are_taken() -> None:
    """Both ends included."""
    for event in (feedback("s", "f", signal="task", reward=-1.0), score("s", "task", session=1.0, turns={"a": -1.0})):
        SIGNALS.check(event)
