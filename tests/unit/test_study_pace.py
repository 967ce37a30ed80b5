"""The simulated users' pace: they follow the learner, whatever the engine's speed."""

import pytest

from learner.study.pace import LIMIT_S, UNLEARNED, NotLearning, Pace


class Learner:
    """A learner that is done with one more completion at each of the given times; sleeping moves its clock."""

    def __init__(self, *done_at: float) -> None:
        self.now = 0.0
        self._done_at = done_at
        self.pace = Pace(self.learned, lambda: self.now, self.sleep)

    def learned(self, completion_id: str) -> bool:
        """Completions are named by their place: "0", "1", ..."""
        place = int(completion_id)
        return place < len(self._done_at) and self.now >= self._done_at[place]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def judge(self, count: int) -> None:
        for place in range(count):
            self.pace.judged(str(place))


def test_users_do_not_wait_while_the_learner_keeps_up() -> None:
    """What the learner may still be busy with holds nobody up."""
    learner = Learner()
    learner.judge(UNLEARNED)
    learner.pace.wait()
    assert learner.now == 0.0


def test_users_wait_until_the_learner_has_caught_up() -> None:
    """With two more than may wait, the next request comes when the second of them is learned, at 7 s."""
    learner = Learner(3.0, 7.0)
    learner.judge(UNLEARNED + 2)
    learner.pace.wait()
    assert learner.now == pytest.approx(7.0, abs=0.1)


def test_at_the_end_users_wait_for_all_of_it() -> None:
    """With none allowed to wait, the last one counts too."""
    learner = Learner(3.0)
    learner.judge(1)
    learner.pace.wait(unlearned=0)
    assert learner.now == pytest.approx(3.0, abs=0.1)


def test_a_slow_learner_is_waited_for_as_long_as_it_gets_on() -> None:
    """Each completion that it uses begins the patience anew."""
    learner = Learner(0.9 * LIMIT_S, 1.8 * LIMIT_S)
    learner.judge(UNLEARNED + 2)
    learner.pace.wait()
    assert learner.now == pytest.approx(1.8 * LIMIT_S, abs=0.1)


def test_a_learner_that_stands_still_ends_the_run() -> None:
    """Else the demo would wait for ever; the error names the completion."""
    learner = Learner()
    learner.judge(UNLEARNED + 1)
    with pytest.raises(NotLearning, match="has not used 0 within 120 seconds"):
        learner.pace.wait()
