"""How fast the simulated users go: no faster than the service learns."""

from collections import deque
from collections.abc import Callable

# One judged rollout may wait while the next is sampled: an answer is then two or three versions old when it is trained
# on, whatever the engine's speed. Measured without this, on an engine that answers faster than the learner trains:
# answers were 60 versions old, the importance band masked up to 9 % of the tokens, and of the second and third taste
# little was learned (mean reward .38 and .17 at the end, instead of .97 and .99).
UNLEARNED = 1
LIMIT_S = 120.0
POLL_S = 0.03


class NotLearning(Exception):
    """The learner has not used a judged rollout for a long time."""


class Pace:
    """Holds users back while too many judged completions wait for the learner.

    Args:
        learned: whether the learner is done with a completion: trained on it, or dropped it for good.
        clock: seconds.
    """

    def __init__(
        self, learned: Callable[[str], bool], clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._learned, self._clock, self._sleep = learned, clock, sleep
        self._waiting: deque[str] = deque()

    def judged(self, completion_id: str) -> None:
        self._waiting.append(completion_id)

    def wait(self, unlearned: int = UNLEARNED) -> None:
        """Return when no more than that many wait. Raises NotLearning after `LIMIT_S` without progress."""
        deadline = self._clock() + LIMIT_S
        while len(self._waiting) > unlearned:
            if self._learned(self._waiting[0]):
                self._waiting.popleft()
                deadline = self._clock() + LIMIT_S
            elif self._clock() > deadline:
                raise NotLearning(f"the learner has not used {self._waiting[0]} within {LIMIT_S:.0f} seconds")
            else:
                self._sleep(POLL_S)
