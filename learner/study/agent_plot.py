"""The agent demo's picture: success, what became of the calls, and how far the policy went from its base."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from learner.study.agent_loop import Episode
from learner.study.measure import WINDOW, Update, metrics_by_session, moving_mean
from learner.study.plot import draw_kl

SUCCESS, CALLS, BAD = "#2f8f5b", "#5b3fa8", "#d6457f"


def draw(episodes: Sequence[Episode], updates: Sequence[Update], path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1))
    _draw_success(top, episodes)
    _draw_calls(middle, episodes)
    draw_kl(bottom, metrics_by_session([episode.session for episode in episodes], updates))
    bottom.set_xlabel("session")
    figure.legend(loc="outside lower center", ncols=5, fontsize=9)
    figure.suptitle("An agent learns to call its calculator while it serves: each session is one update")
    figure.savefig(path, dpi=130)


def _draw_success(axes: Axes, episodes: Sequence[Episode]) -> None:
    numbers = range(1, len(episodes) + 1)
    axes.scatter(numbers, [e.reward for e in episodes], s=6, color="0.6", label="one session")
    axes.plot(numbers, moving_mean([e.reward for e in episodes]), color=SUCCESS, linewidth=2, label="success")
    axes.set_ylabel(f"mean of the last {WINDOW}")
    axes.set_ylim(-0.02, 1.02)


def _draw_calls(axes: Axes, episodes: Sequence[Episode]) -> None:
    numbers = range(1, len(episodes) + 1)
    axes.plot(numbers, moving_mean([e.calls for e in episodes]), color=CALLS, label="calls a session")
    axes.plot(numbers, moving_mean([len(e.faults) for e in episodes]), color=BAD, label="bad calls a session")
    axes.set_ylabel(f"mean of the last {WINDOW}")
    axes.set_ylim(bottom=0)
