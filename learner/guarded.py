"""A reward function that answers in time, with numbers that can be trained on, or not at all."""

import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from learner.rewards.view import CannotScore, RewardFunction, Scores, SessionView

MAX_HANGING = 16  # a call cannot be ended from outside; each that hangs keeps its thread


class Guarded:
    """Calls a reward function, each call in a thread of its own, so that one that hangs holds up nobody.

    Args:
        timeout_s: how long a call may take; then it is left to itself.
        low, high: the policy's range of rewards.
    """

    def __init__(self, function: RewardFunction, timeout_s: float, low: float, high: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._low, self._high = low, high
        self._lock = threading.Lock()
        self._hanging: list[threading.Thread] = []

    def __call__(self, view: SessionView) -> Scores:
        """The session's scores; raises CannotScore with the reason, whatever went wrong."""
        self._require_free_threads()
        outcome: Future[Scores] = Future()
        thread = threading.Thread(target=self._run, args=(view, outcome), name="reward", daemon=True)
        thread.start()
        try:
            scores = outcome.result(self._timeout_s)
        except TimeoutError:
            with self._lock:
                self._hanging.append(thread)
            raise CannotScore(f"no answer within {self._timeout_s:g} s") from None
        self._check(scores, view)
        return scores

    def _run(self, view: SessionView, outcome: "Future[Scores]") -> None:
        try:
            outcome.set_result(self._function(view))
        except CannotScore as error:
            outcome.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything, and its message may hold content
            outcome.set_exception(CannotScore(f"the reward function raised {type(error).__name__}"))

    def _require_free_threads(self) -> None:
        with self._lock:
            self._hanging = [thread for thread in self._hanging if thread.is_alive()]
            if len(self._hanging) >= MAX_HANGING:
                raise CannotScore(f"{MAX_HANGING} earlier calls of the reward function have not returned")

    def _check(self, scores: Scores, view: SessionView) -> None:
        if not isinstance(scores, Scores) or not isinstance(scores.turns, Mapping):
            raise CannotScore(f"the reward function gave a {type(scores).__name__}; it must give Scores")
        known = {turn.completion_id for turn in view.turns}
        if not scores.turns.keys() <= known:
            raise CannotScore("the reward function scored a turn that the session does not have")
        for value in (*scores.turns.values(), *([] if scores.session is None else [scores.session])):
            self._check_number(value)

    def _check_number(self, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CannotScore(f"the reward function gave a {type(value).__name__} that is no finite number")
        if not self._low <= value <= self._high:
            raise CannotScore(f"the reward function gave {value:g}, outside {self._low:g} to {self._high:g}")
