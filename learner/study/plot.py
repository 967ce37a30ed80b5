"""The demo's picture: how the answers followed what users liked, and how far the policy went from its base."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from learner.study.measure import WINDOW, Rollout, Update, alarms, metrics_by_session, moving_mean
from learner.tiny.styles import STYLE_NAMES

COLOURS = dict(zip(STYLE_NAMES, ("#d6457f", "#5b3fa8", "#2f8f5b"), strict=True))
ALARM = "#c0392b"


def draw(rollouts: Sequence[Rollout], updates: Sequence[Update], path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_scores(above, rollouts)
    _draw_distance(below, rollouts, updates)
    _draw_phases(above, below, rollouts)
    for number in alarms([rollout.session for rollout in rollouts], updates):
        for axes in (above, below):
            axes.axvline(number, color=ALARM, linestyle=":", linewidth=1)
    figure.legend(loc="outside lower center", ncols=6, fontsize=9)
    figure.suptitle("Riacho learns while it serves: each reward is one update, each update one adapter version")
    figure.savefig(path, dpi=130)


def _draw_scores(axes: Axes, rollouts: Sequence[Rollout]) -> None:
    numbers = range(1, len(rollouts) + 1)
    axes.scatter(numbers, [r.reward for r in rollouts], s=6, color="0.6", label="reward of one rollout")
    for style, colour in COLOURS.items():
        scores = moving_mean([r.scores[style] for r in rollouts])
        axes.plot(numbers, scores, color=colour, linewidth=1.2, label=f"score as {style}")
    axes.plot(numbers, moving_mean([r.reward for r in rollouts]), color="black", linewidth=2, label="reward")
    axes.plot([], [], color=ALARM, linestyle=":", label="shift alarm")
    axes.set_ylabel(f"mean of the last {WINDOW}")
    axes.set_ylim(-0.02, 1.02)


def _draw_distance(axes: Axes, rollouts: Sequence[Rollout], updates: Sequence[Update]) -> None:
    rows = metrics_by_session([rollout.session for rollout in rollouts], updates)
    draw_kl(axes, rows)
    lag = axes.twinx()
    lag.step([n for n, _ in rows], [m["version_lag"] for _, m in rows], color="0.6", linewidth=0.8)
    lag.set_ylabel("version lag", color="0.5")
    lag.set_ylim(bottom=0)
    axes.set_xlabel("rollout")


def draw_kl(axes: Axes, rows: Sequence[tuple[int, Update]]) -> None:
    """How far the policy was from its base at each numbered update."""
    axes.plot([n for n, _ in rows], [m["kl_to_base"] for _, m in rows], color="black", linewidth=1)
    axes.set_ylabel("KL to the base\n(nats a token)")


def _draw_phases(above: Axes, below: Axes, rollouts: Sequence[Rollout]) -> None:
    start = 0.5
    for style, group in groupby(rollouts, lambda rollout: rollout.style):
        end = start + sum(1 for _ in group)
        for axes in (above, below):
            axes.axvspan(start, end, color=COLOURS[style], alpha=0.08, linewidth=0)
        above.text((start + end) / 2, 1.03, f"users want {style}", ha="center", va="bottom", color=COLOURS[style])
        start = end
