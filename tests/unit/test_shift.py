"""The change-point test on the reward stream, against an independent implementation and by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.settings import TrainingSettings
from learner.shift import ShiftDetector

REWARDS = st.lists(st.floats(0, 1), max_size=60)
PHASES = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.8, 1.0]), st.integers(1, 30)), min_size=1, max_size=5)


def _alarms(rewards: Sequence[float], settings: TrainingSettings) -> list[int]:
    detector = ShiftDetector()
    return [i for i, reward in enumerate(rewards) if detector.observe(reward, settings)]


def _reference_alarms(rewards: Sequence[float], threshold: float, min_mean: float) -> list[int]:
    """Page's CUSUM without dead time, from the whole history: reference = the 16 rewards before the suspicious run.

    The test begins with the twelfth reward and needs 8 rewards of reference.
    """
    alarms: list[int] = []
    statistic, suspicious = 0.0, 0
    for i, reward in enumerate(rewards):
        end = i - suspicious
        window = [rewards[j] for j in range(max(0, end - 16), end)]
        if i + 1 < 12 or len(window) < 8:
            continue
        good = min(0.93, math.fsum(window) / len(window))
        if not good > min_mean:
            continue
        bad = good / 4
        likelihoods = [p**reward * (1 - p) ** (1 - reward) for p in (bad, good)]
        statistic += math.log(likelihoods[0] / likelihoods[1])
        if statistic <= 0:
            statistic, suspicious = 0.0, 0
            continue
        suspicious += 1
        if statistic > threshold:
            alarms.append(i)
            statistic, suspicious = 0.0, 0
    return alarms


@given(REWARDS, st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.sampled_from([0.0, 0.2, 0.45]))
def test_alarms_equal_an_independent_cusum_on_random_rewards(
    rewards: list[float], threshold: float, min_mean: float
) -> None:
    """On any stream the alarms are those of the definition, evaluated over the whole history."""
    settings = TrainingSettings(shift_threshold=threshold, shift_min_mean=min_mean, shift_dead_time=0)
    assert _alarms(rewards, settings) == _reference_alarms(rewards, threshold, min_mean)


@given(PHASES, st.sampled_from([1.0, 4.0]))
def test_alarms_equal_an_independent_cusum_on_phases(phases: list[tuple[float, int]], threshold: float) -> None:
    """On streams that do shift, and long enough that old rewards are forgotten."""
    rewards = [level for level, count in phases for _ in range(count)]
    settings = TrainingSettings(shift_threshold=threshold, shift_dead_time=0)
    assert _alarms(rewards, settings) == _reference_alarms(rewards, threshold, 0.45)


@given(st.floats(0, 1), st.integers(1, 120))
def test_constant_stream_never_alarms(reward: float, count: int) -> None:
    """Whatever its level, a stream that does not move raises nothing."""
    assert _alarms([reward] * count, TrainingSettings()) == []


def test_collapse_is_found_with_the_fourth_bad_reward() -> None:
    """From 1 (capped at .93) to 0 each reward adds ln(.7675/.07) = 2.39 nats: the fourth passes 8."""
    assert math.log(0.7675 / 0.07) == pytest.approx(2.39, abs=0.01)
    assert _alarms([1.0] * 20 + [0.0] * 5, TrainingSettings()) == [23]


def test_one_bad_reward_is_not_a_shift() -> None:
    """A single 0 between good rewards does not alarm, and its evidence is gone by the next."""
    assert _alarms(([1.0] * 20 + [0.0]) * 3, TrainingSettings()) == []


def test_improvement_is_not_a_shift() -> None:
    """Rewards that rise raise nothing."""
    assert _alarms([0.5] * 20 + [1.0] * 20, TrainingSettings()) == []


def test_no_alarm_where_rewards_were_low() -> None:
    """A stream that never was above shift_min_mean has nothing to lose."""
    stream = [0.4] * 20 + [0.0] * 20
    assert _alarms(stream, TrainingSettings()) == []
    assert _alarms(stream, TrainingSettings(shift_min_mean=0.3)) != []


def test_no_alarm_before_there_is_a_reference() -> None:
    """The first eleven rewards cannot alarm."""
    settings = TrainingSettings(shift_threshold=0.5)
    assert _alarms([1.0] * 9 + [0.0] * 2, settings) == []
    assert _alarms([1.0] * 11 + [0.0], settings) == [11]


@pytest.mark.parametrize("dead_time", [0, 1, 2, 12])
def test_dead_time_is_that_many_rewards_without_another_alarm(dead_time: int) -> None:
    """With a threshold that one 0 passes, a 0 up to `shift_dead_time` rewards after an alarm raises nothing."""
    settings = TrainingSettings(shift_threshold=0.5, shift_dead_time=dead_time)
    second = [_alarms([1.0] * 40 + [0.0] + [1.0] * gap + [0.0], settings)[1:] for gap in range(dead_time + 1)]
    assert second == [[]] * dead_time + [[41 + dead_time]]


@given(REWARDS)
def test_state_round_trip_at_every_step_changes_nothing(rewards: list[float]) -> None:
    """A detector restored from its checkpointed state raises the same alarms."""
    settings = TrainingSettings(shift_threshold=1.0, shift_min_mean=0.2, shift_dead_time=3)
    undisturbed, resumed = ShiftDetector(), ShiftDetector()
    for reward in rewards:
        resumed = ShiftDetector(**json.loads(json.dumps(asdict(resumed))))
        assert resumed.observe(reward, settings) == undisturbed.observe(reward, settings)
    assert resumed == undisturbed


def test_state_stays_small() -> None:
    """What the detector remembers does not grow with the stream."""
    detector = ShiftDetector()
    for i in range(1000):
        detector.observe(float(i % 3 > 0), TrainingSettings())
    assert len(detector.rewards) < 100
