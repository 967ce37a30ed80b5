"""How fast the simulated users go: no faster than the service learns."""

from collections import deque
from collections.abc import Callable

# At most one judged rollout waits while the next is sampled, so that an answer is two or three versions old when it
# is trained on, whatever the engine's speed. Measured without this on an engine that answers faster than the learner
# trains: versions grew 60 old, the importance band masked up to 9 % of the tokens, and after the first change of taste
# nothing was learned.
UNLEARNED = 1
LIMIT_S = 120.0
POLL_S = 0.03


class NotLearning(Exception):
    """The learner has not used a judged rollout for a long time."""


class Pace:
    """Holds the next request back while more than `UNLEARNED` judged completions wait for the learner.

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

    def wait(self) -> None:
        """Return when the next request may be sent. Raises NotLearning after `LIMIT_S` without progress."""
        deadline = self._clock() + LIMIT_S
        while len(self._waiting) > UNLEARNED:
            if self._learned(self._waiting[0]):
                self._waiting.popleft()
                deadline = self._clock() + LIMIT_S
            elif self._clock() > deadline:
                raise NotLearning(f"the learner has not used {self._waiting[0]} within {LIMIT_S:.0f} seconds")
            else:
                self._sleep(POLL_S)
