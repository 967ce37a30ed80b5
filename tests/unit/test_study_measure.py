"""The demo's numbers, against values worked out by hand."""

from typing import Any

import pytest

from learner.study import measure
from learner.study.measure import Rollout


def rollout(session: str, reward: float = 0.0, style: str = "cute", **at: Any) -> Rollout:
    times = {"version": 0, "started": 0.0, "accepted": 0.0, **at}
    return Rollout(session=session, style=style, scores={style: reward}, **times)


def update(number: int, session: str, version: int | None = None, **metrics: Any) -> dict[str, Any]:
    return {"number": number, "session_ids": [session], "version": version, "metrics": metrics}


def test_a_moving_mean_uses_what_there_is_at_its_start() -> None:
    """1, then (1 + 3) / 2, then (3 + 8) / 2."""
    assert measure.moving_mean([1, 3, 8], window=2) == [1, 2, 5.5]


def test_good_is_reached_only_above_the_level() -> None:
    """The means of two are .5, .7 and .75: the third rollout ends the second pair, the fourth the first above .7."""
    assert measure.rollouts_until([0.5, 0.5, 0.9, 0.6], level=0.7, window=2) == 4


def test_good_is_not_reached_before_the_window_is_full() -> None:
    """Nineteen perfect rewards are one too few for a mean of twenty."""
    assert measure.rollouts_until([1.0] * 19) is None


def test_good_is_reached_with_the_first_full_window() -> None:
    """Twenty perfect rewards."""
    assert measure.rollouts_until([1.0] * 25) == 20


def test_a_phase_is_summed_up_by_its_first_and_last_rewards() -> None:
    """15 zeros, 15 halves, 30 ones: the first 15 mean 0, the last 30 mean 1.

    A window of n ones has the mean (10 + n / 2) / 20 while the rest are halves, which exceeds .7 from n = 9 on.
    """
    rewards = [0.0] * 15 + [0.5] * 15 + [1.0] * 30
    (phase,) = measure.phase_summaries([rollout(str(i), r) for i, r in enumerate(rewards)])
    assert phase == measure.Phase("cute", 60, 0.0, 1.0, 30 + 9)


def test_each_taste_is_a_phase() -> None:
    """The preference moves twice, and the order is kept."""
    styles = ["cute", "cute", "chuunibyou", "classical", "classical"]
    phases = measure.phase_summaries([rollout(str(i), 1.0, style) for i, style in enumerate(styles)])
    assert [(p.style, p.rollouts) for p in phases] == [("cute", 2), ("chuunibyou", 1), ("classical", 2)]


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.51, 3), (0.95, 4), (0.0, 1), (1.0, 4)])
def test_a_percentile_is_one_of_the_values(share: float, value: int) -> None:
    """Nearest rank of 1, 2, 3, 4: half of the values are at most 2."""
    assert measure.percentile([4, 2, 1, 3], share) == value


def test_nothing_measured_has_no_percentile() -> None:
    """None, and not 0."""
    assert measure.quantiles([]) == measure.Quantiles(None, None)


def test_a_reaction_ends_with_the_first_request_that_the_feedback_shaped() -> None:
    """Accepted at 1.0 and learned in version 7: version 6 at 1.5 does not count, version 7 at 2.0 does."""
    rollouts = [
        rollout("a", version=5, started=0.0, accepted=1.0),
        rollout("b", version=6, started=1.5, accepted=1.9),
        rollout("c", version=7, started=2.0, accepted=2.5),
    ]
    assert measure.reaction_times(rollouts, {"a": 7}) == [1.0]


def test_a_newer_version_has_learned_too() -> None:
    """Version 8 comes after 7 and contains it."""
    rollouts = [rollout("a", accepted=1.0), rollout("b", version=8, started=4.0, accepted=5.0)]
    assert measure.reaction_times(rollouts, {"a": 7}) == [3.0]


def test_feedback_without_a_later_effect_has_no_reaction_time() -> None:
    """The last feedback of a run shapes no answer of it, and a dropped one shapes none at all."""
    rollouts = [rollout("a", accepted=1.0), rollout("b", version=3, started=2.0, accepted=3.0)]
    assert measure.reaction_times(rollouts, {"b": 4}) == []


def test_a_session_is_learned_in_the_version_of_its_update() -> None:
    """An update whose version was rejected has none."""
    updates = [update(1, "a", version=1), update(2, "b", version=None), update(3, "c", version=3)]
    assert measure.learned_versions(updates) == {"a": 1, "c": 3}


def test_the_masked_fraction_is_of_tokens_and_not_of_updates() -> None:
    """(.1 + .1) × 10 + 0 × 30 of 40 tokens are .05."""
    updates = [
        update(1, "a", masked_low=0.1, masked_high=0.1, action_tokens=10),
        update(2, "b", masked_low=0.0, masked_high=0.0, action_tokens=30),
    ]
    assert measure.masked_fraction(updates) == pytest.approx(0.05)


def test_without_updates_nothing_is_masked() -> None:
    """A service that learned nothing masked nothing."""
    assert measure.masked_fraction([]) == 0.0


def test_explained_variance_is_that_of_the_last_update_of_the_phase() -> None:
    """The window runs, so its last value is the phase's; the next phase's updates do not count."""
    updates = [update(n, name, explained_variance=n / 10) for n, name in enumerate("abc", start=1)]
    assert measure.explained_variance([rollout("a"), rollout("b")], updates) == 0.2


def test_an_alarm_is_placed_at_the_rollout_that_raised_it() -> None:
    """The second rollout's update saw the shift."""
    updates = [update(1, "a", shifted=False), update(2, "b", shifted=True)]
    assert measure.alarms(["a", "b"], updates) == [2]
