"""What an update takes for long episodes on the tiny model: CPU seconds by phase, and memory.

    python -m tests.bench.episodes           # --json FILE keeps the numbers; --turns 12 --turns 50 for some sizes

A turn has 160 tokens: an observation, thinking and an answer. In a session of kind `kept` the next prompt extends all
tokens before it, so that the session is one sequence. In one of kind `dropped` a user asks again every 25 turns, and
the template then leaves out all earlier thinking, so that each question starts a sequence.

Attention compares every token of a sequence with all before it, so time is fitted as a T + b T^2 (T^2 summed over the
sequences), by least squares on the seconds a token. Memory is what the process grows by from a warm update of one turn
on; it follows the longest sequence, since sequences are taken one after the other.
"""

import itertools
import json
import multiprocessing
import random
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression

import click
import torch
from rich.console import Console
from rich.table import Table

from app.settings import TINY_MODEL
from learner.critic import make_policy_and_critic
from learner.models import load_base
from learner.rollouts import Rollout, Turn, pack
from learner.settings import TrainingSettings
from learner.trainer import Trainer
from tests.builders import turn

TURNS = {"kept": (12, 25, 50, 100, 200), "dropped": (12, 25, 50)}
OBSERVATION, THINKING, ANSWER = 50, 100, 10
TURNS_A_QUESTION = 25
VOCABULARY = 3000  # below the special tokens
LOGPROB = -8.0  # near that of a random token, so that most tokens are in band


@dataclass(frozen=True, slots=True)
class Measured:
    """One update.

    Attributes:
        tokens: of all sequences together; `squares`: the sum of the squares of their lengths.
        seconds: of CPU time, by phase. grown_mb: of the process' highest resident memory, in MiB.
    """

    kind: str
    turns: int
    sequences: int
    tokens: int
    longest: int
    squares: int
    action_tokens: int
    seconds: dict[str, float]
    grown_mb: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def session(kind: str, count: int) -> Rollout:
    """A session of random tokens that are the same every time."""
    rng = random.Random(0)

    def some(tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(VOCABULARY), k=tokens))

    def turns() -> Iterator[Turn]:
        history, without_thinking = (), ()
        for number in range(count):
            if kind == "dropped" and number % TURNS_A_QUESTION == 0:
                history = without_thinking
            observation, thinking, answer = some(OBSERVATION), some(THINKING), some(ANSWER)
            sampled = thinking + answer
            yield turn(history + observation, sampled, completion_id=f"c{number}", logprobs=(LOGPROB,) * len(sampled))
            history += observation + sampled
            without_thinking += observation + answer

    return Rollout("session", tuple(turns()), 1.0)


def measure(kind: str, count: int) -> Measured:
    """One update with the default settings on one thread, after a short one."""
    torch.set_num_threads(1)
    settings = TrainingSettings()
    base = load_base(str(TINY_MODEL))
    base.config.max_position_embeddings = count * (OBSERVATION + THINKING + ANSWER)
    policy, critic = make_policy_and_critic(base, settings)
    trainer = Trainer(policy, critic, settings, (0.0, 1.0), time.process_time)
    trainer.update([session(kind, 1)])
    rollout = session(kind, count)
    lengths = [len(sequence.ids) for sequence in pack(rollout.turns)]
    before = _highest_mb()
    report = trainer.update([rollout])
    return Measured(
        kind,
        count,
        len(lengths),
        sum(lengths),
        max(lengths),
        sum(length**2 for length in lengths),
        report.action_tokens,
        report.seconds,
        _highest_mb() - before,
    )


def _highest_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(kind: str, found: Sequence[Measured]) -> None:
    """A line for each size, and what the fit says."""
    per_token = [one.total / one.tokens for one in found]
    slope, intercept = linear_regression([one.squares / one.tokens for one in found], per_token)
    phases = list(found[0].seconds)
    table = Table(
        *("turns", "sequences", "tokens", "longest", "actions"),
        *(f"{phase} s" for phase in phases),
        *("total s", "ms a token", "attention's T^2", "grown MiB", "KiB a token of the longest"),
        title=f"Thinking {kind}: {intercept * 1e3:.2f} ms a token + {slope * 1e9:.0f} ns a token squared",
        title_justify="left",
    )
    for one, token_s in zip(found, per_token, strict=True):
        sizes = (one.turns, one.sequences, one.tokens, one.longest, one.action_tokens)
        table.add_row(
            *map(str, sizes),
            *(f"{one.seconds[phase]:.1f}" for phase in phases),
            f"{one.total:.1f}",
            f"{1e3 * token_s:.2f}",
            f"{slope * one.squares / one.total:.0%}",
            f"{one.grown_mb:.0f}",
            f"{1024 * one.grown_mb / one.longest:.0f}",
        )
    Console(width=160).print(table)


@click.command()
@click.option("--turns", multiple=True, type=click.IntRange(1), help="Sizes of sessions, in turns, of both kinds.")
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers there.")
def main(turns: tuple[int, ...], target: Path | None) -> None:
    """CPU time and memory of an update on long sessions, each in a process of its own."""
    sizes = {kind: turns or usual for kind, usual in TURNS.items()}
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, list[Measured]] = {}
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as processes:
        for kind, counts in sizes.items():
            found[kind] = list(processes.map(measure, itertools.repeat(kind), counts))
            show(kind, found[kind])
    if target is not None:
        target.write_text(json.dumps({kind: [asdict(one) for one in ones] for kind, ones in found.items()}, indent=1))


if __name__ == "__main__":
    main()
