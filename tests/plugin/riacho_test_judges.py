"""A reward function as somebody's package brings it; a test steers it from outside by a file."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.rewards.view import CannotScore, RewardFunction, Scores, SessionView

SLOW_S = 0.5


def steered(options: Mapping[str, Any]) -> RewardFunction:
    """Does what FOLDER/mode says, and notes in FOLDER/calls which session it was asked about.

    `good` and `slow` give 0, 0.1, … 0.9 in turn over all calls, so that a second call gives another reward.
    """
    folder = Path(options["folder"])
    lock = threading.Lock()

    def function(view: SessionView) -> Scores:
        with lock, (folder / "calls").open("a") as calls:
            calls.write(f"{view.session_id}\n")
            calls.flush()
            number = len((folder / "calls").read_text().splitlines())
        mode = (folder / "mode").read_text()
        if mode == "hang":
            threading.Event().wait()
        if mode == "error":
            raise RuntimeError("broken")
        if mode == "nonsense":
            return Scores(float("nan"))
        if mode == "away":
            raise CannotScore("nobody answers")
        if mode == "slow":
            time.sleep(SLOW_S)
        return Scores(number % 10 / 10)

    return function
