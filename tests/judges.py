"""The plug-in of tests/plugin, installed for one process by PYTHONPATH, and the file that steers it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Steered:
    """One steered reward function, of the signal `judge`."""

    def __init__(self, folder: Path, mode: str = "good") -> None:
        self.folder = folder
        folder.mkdir()
        self.mode(mode)

    def mode(self, mode: str) -> None:
        """From the next call on; replaced as a whole, since calls read it at any moment."""
        aside = self.folder / "mode.new"
        aside.write_text(mode)
        aside.replace(self.folder / "mode")

    def calls(self) -> list[str]:
        """The session of each call."""
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def variables(self, on_failure: str) -> dict[str, str]:
        """RIACHO_* variables for a weight of 0.5 beside the clients' reward, with short times."""
        return {
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "plugin"))),
            "RIACHO_REWARDS_REWARD_WEIGHT": "1",
            "RIACHO_REWARDS_JUDGE_WEIGHT": "0.5",
            "RIACHO_REWARDS_JUDGE_SCORER": "steered",
            "RIACHO_REWARDS_JUDGE_ON_FAILURE": on_failure,
            "RIACHO_REWARDS_JUDGE_OPTIONS_FOLDER": str(self.folder),
            "RIACHO_LEARNER_SCORE_TIMEOUT_S": "2",
            "RIACHO_LEARNER_SCORE_RETRY_S": "0.05",
        }
