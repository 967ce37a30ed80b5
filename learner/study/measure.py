"""The demo's numbers, as pure functions of what was asked, answered, rewarded and learned."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

FIRST = 15
LAST = 30
WINDOW = 20
GOOD = 0.7

Update = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One conversation: `started` is the request's sending, `accepted` the feedback's 200, on one clock.

    `scores` judges the answer by every style; the reward is the score of the preferred `style`.
    """

    session: str
    style: str
    version: int
    started: float
    accepted: float
    scores: Mapping[str, float]
    text: str = ""

    @property
    def reward(self) -> float:
        return self.scores[self.style]


@dataclass(frozen=True, slots=True)
class Phase:
    """The summary of one preference; `first15` and `last30` are mean rewards."""

    style: str
    rollouts: int
    first15: float
    last30: float
    rollouts_to_0_7: int | None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 95th percentile, None where nothing was measured."""

    p50: float | None
    p95: float | None


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def moving_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """At each place the mean of the up to `window` values that end there."""
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def rollouts_until(rewards: Sequence[float], level: float = GOOD, window: int = WINDOW) -> int | None:
    """After how many rollouts the mean of the last `window` was first above `level`; None if it never was."""
    means = enumerate(moving_mean(rewards, window), start=1)
    return next((count for count, value in means if count >= window and value > level), None)


def phase_summaries(rollouts: Iterable[Rollout]) -> list[Phase]:
    """One summary for each run of rollouts with the same preference."""
    return [_summary(style, [r.reward for r in group]) for style, group in groupby(rollouts, lambda r: r.style)]


def _summary(style: str, rewards: Sequence[float]) -> Phase:
    return Phase(style, len(rewards), mean(rewards[:FIRST]), mean(rewards[-LAST:]), rollouts_until(rewards))


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed (nearest rank)."""
    if not values:
        return None
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def quantiles(values: Sequence[float]) -> Quantiles:
    return Quantiles(percentile(values, 0.5), percentile(values, 0.95))


def learned_versions(updates: Iterable[Update]) -> dict[str, int]:
    """For each session the version that the update trained on it went into.

    Updates whose version was rejected or not published are left out.
    """
    return {
        session: update["version"]
        for update in updates
        if update["version"] is not None
        for session in update["session_ids"]
    }


def reaction_times(rollouts: Sequence[Rollout], learned: Mapping[str, int]) -> list[float]:
    """Seconds from each accepted feedback to the next request that a version trained on it answered.

    The policy is updated once a rollout, so a feedback has a version of its own: the first that has learned from
    it. Its reaction time ends when the first request whose answer came from that version, or from a newer one,
    was sent. This is stricter than "any newer version": one that was on its way already, trained on earlier
    feedback, does not count. Feedback that no later request could show an effect of has no reaction time.
    """
    asked = sorted(rollouts, key=lambda rollout: rollout.started)
    times = (_reaction(rollout, learned[rollout.session], asked) for rollout in asked if rollout.session in learned)
    return [time for time in times if time is not None]


def _reaction(judged: Rollout, version: int, asked: Sequence[Rollout]) -> float | None:
    later = (r.started - judged.accepted for r in asked if r.started >= judged.accepted and r.version >= version)
    return next(later, None)


def masked_fraction(updates: Iterable[Update]) -> float:
    """The share of all action tokens that the importance band masked; 0 without updates."""
    metrics = [update["metrics"] for update in updates]
    tokens = sum(m["action_tokens"] for m in metrics)
    masked = sum((m["masked_low"] + m["masked_high"]) * m["action_tokens"] for m in metrics)
    return masked / tokens if tokens else 0.0


def explained_variance(rollouts: Iterable[Rollout], updates: Iterable[Update]) -> float | None:
    """The critic's running explained variance after the last update trained on one of these rollouts."""
    sessions = {rollout.session for rollout in rollouts}
    own = [update for update in updates if sessions.intersection(update["session_ids"])]
    if not own:
        return None
    value: float | None = max(own, key=lambda update: update["number"])["metrics"]["explained_variance"]
    return value


def alarms(sessions: Sequence[str], updates: Iterable[Update]) -> list[int]:
    """The numbers, counted from 1, of the sessions at which the learner saw the rewards shift."""
    return [number for number, metrics in metrics_by_session(sessions, updates) if metrics["shifted"]]


def metrics_by_session(sessions: Sequence[str], updates: Iterable[Update]) -> list[tuple[int, Mapping[str, Any]]]:
    """For each session that was trained on, its number, counted from 1, and its update's metrics, in order."""
    numbers = {session: number for number, session in enumerate(sessions, start=1)}
    rows = [
        (numbers[session], update["metrics"])
        for update in updates
        for session in update["session_ids"]
        if session in numbers
    ]
    return sorted(rows, key=lambda row: row[0])
