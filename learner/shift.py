"""A change-point test on the reward stream: has what users like moved? [ours]"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.settings import TrainingSettings

REFERENCE = 16
ENOUGH = 8
FIRST = 12
CEILING = 0.93
DROP = 0.25


@dataclass
class ShiftDetector:
    """Page's CUSUM on rewards scaled to [0, 1], with the Bernoulli likelihood ratio.

    Tests the mean of the 16 rewards before the suspicious run against a quarter of it. Acts on event data only,
    so that a replay raises the same alarms.
    """

    rewards: list[float] = field(default_factory=list)
    evidence: float = 0.0
    run: int = 0
    dead_time: int = 0

    def observe(self, reward: float, settings: TrainingSettings) -> bool:
        """Take the next reward in [0, 1]; true if the stream has shifted."""
        self.rewards = [*self.rewards[-(self.run + REFERENCE + 1) :], reward]
        if self.dead_time:
            self.dead_time -= 1
            return False
        alarm = self._accumulate(reward, settings)
        if alarm:
            self.dead_time, self.evidence, self.run = settings.shift_dead_time, 0.0, 0
        return alarm

    def _accumulate(self, reward: float, settings: TrainingSettings) -> bool:
        before = _reference(self.rewards, self.run)
        if len(self.rewards) < FIRST or len(before) < ENOUGH:
            return False
        mean = min(CEILING, math.fsum(before) / len(before))
        if mean <= settings.shift_min_mean:
            return False
        low = DROP * mean
        self.evidence = max(0.0, self.evidence + _log_likelihood_ratio(reward, low, mean))
        self.run = self.run + 1 if self.evidence > 0 else 0
        return self.evidence > settings.shift_threshold


def _reference(rewards: Sequence[float], run: int) -> Sequence[float]:
    """The rewards before the suspicious run, without the newest."""
    return rewards[: len(rewards) - 1 - run][-REFERENCE:]


def _log_likelihood_ratio(reward: float, low: float, mean: float) -> float:
    return reward * math.log(low / mean) + (1 - reward) * math.log((1 - low) / (1 - mean))
