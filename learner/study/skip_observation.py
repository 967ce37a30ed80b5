"""Does it matter that GAE skips observation tokens? `python -m learner.study.skip_observation [--json FILE]`.

The agents' task in this process, with two estimators, each without and with padding of random length in what the
tool returns, for three seeds. The estimator that the learner has no setting for steps over observation tokens too.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from learner import sao
from learner.rollouts import PackedSequence, Rollout
from learner.study import measure
from learner.study.agent_loop import Tool
from learner.study.agent_offline import Offline
from learner.study.agent_task import run_tool, tasks
from learner.trainer import Prepared, Trainer

SEEDS = (1, 2, 3)
SESSIONS = 120
ENDS = 30
# Of what was tried, blank lines before the result disturb the base least: after up to 40 of them it still copies the
# result in half of the cases, and where up to 40 words follow it in a fifth (temperature 1).
PADDING = 24
PAD = "\n"


class ObservationInside(Trainer):
    """GAE over all tokens of a sequence from its first action on, as if the model had sampled them.

    An observation token is a step with reward 0 whose value is bootstrapped from. It gets no policy loss and no
    value loss, so that the arms differ in the advantages alone.
    """

    def _prepare(self, rollout: Rollout) -> Prepared:
        prepared = super()._prepare(rollout)
        steps = [_from_first_action(sequence) for sequence in prepared.sequences]
        with torch.no_grad():
            values = [self.critic.values(s.ids, at) for s, at in zip(prepared.sequences, steps, strict=True)]
        acted = torch.cat([torch.isin(at, s.positions) for s, at in zip(prepared.sequences, steps, strict=True)])
        advantages = gae_through_observations(
            torch.cat(values), rollout.token_rewards(), acted, self.settings.gamma, self.settings.lambda_alpha
        )
        return replace(prepared, advantages=advantages)


def gae_through_observations(values: Tensor, rewards: Tensor, acted: Tensor, gamma: float, alpha: float) -> Tensor:
    """The advantages of the A action tokens, [A], from GAE over all T steps.

    Args:
        values: of the prefix before each step, [T].
        rewards: of the action tokens, [A].
        acted: which steps are action tokens, [T].
        alpha: of lambda, which here counts all steps.
    """
    stepwise = torch.zeros_like(values)
    stepwise[acted] = rewards
    lam = sao.policy_lambda(len(values), alpha)
    return sao.skip_observation_gae(values, stepwise, gamma, lam)[acted]


def _from_first_action(sequence: PackedSequence) -> Tensor:
    return torch.arange(int(sequence.positions[0]), len(sequence.ids))


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to estimate advantages, and whether tool results are padded."""

    estimator: str
    padded: bool


@dataclass(frozen=True, slots=True)
class Result:
    """One run: the success of all sessions, and of the last ones."""

    arm: Arm
    seed: int
    success: float
    success_last: float


TRAINERS: dict[str, type[Trainer]] = {"skipped": Trainer, "inside": ObservationInside}
ARMS = tuple(Arm(estimator, padded) for padded in (False, True) for estimator in TRAINERS)


def padded_tool(rng: Random) -> Tool:
    """The tools, with 0 to `PADDING` blank lines before what they say."""
    return lambda call: PAD * rng.randint(0, PADDING) + run_tool(call)


def run(arm: Arm, seed: int, sessions: int) -> Result:
    """Learn the task from the start; the tasks are the same in all arms."""
    learner = Offline(seed, TRAINERS[arm.estimator])
    tool = padded_tool(Random(seed)) if arm.padded else run_tool
    episodes = [learner.work(task, tool) for task in islice(tasks(Random(seed)), sessions)]
    success = [episode.success for episode in episodes]
    return Result(arm, seed, measure.mean(success), measure.mean(success[-ENDS:]))


def table(results: Sequence[Result], sessions: int) -> Table:
    """A row an arm: the means over the seeds, and each seed's success."""
    shown = Table(title=f"Observation tokens in GAE: {sessions} sessions, seeds {', '.join(map(str, SEEDS))}")
    for column in ("observations", "padding", "success", "by seed", f"success, last {ENDS}", "by seed"):
        shown.add_column(column)
    for arm in ARMS:
        own = [result for result in results if result.arm == arm]
        padding = f"0–{PADDING} lines" if arm.padded else "none"
        shown.add_row(
            arm.estimator,
            padding,
            *_mean_and_each([r.success for r in own]),
            *_mean_and_each([r.success_last for r in own]),
        )
    return shown


def _mean_and_each(values: Sequence[float]) -> tuple[str, str]:
    return f"{measure.mean(values):.2f}", " ".join(f"{value:.2f}" for value in values)


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers there.")
@click.option("--sessions", type=click.IntRange(min=1), default=SESSIONS, show_default=True, help="A run.")
def main(json_path: Path | None, sessions: int) -> None:
    """Compare GAE that skips observation tokens with GAE that steps over them."""
    torch.set_num_threads(1)
    console = Console()
    results = []
    for seed in SEEDS:
        for arm in ARMS:
            results.append(run(arm, seed, sessions))
            console.print(asdict(results[-1]))
            if json_path:  # after each run, so that one that is stopped leaves what it has
                rows = [asdict(result) for result in results]
                json_path.write_text(
                    json.dumps({"sessions": sessions, "runs": rows}, indent=2) + "\n", encoding="utf-8"
                )
    console.print(table(results, sessions))


if __name__ == "__main__":
    main()
