"""The agent demo: a policy learns to use its tool from nothing but right answers.

Run with `riacho demo-agent` or `python -m learner.study.agent_demo`. A client works through arithmetic with a plain
tool loop over `openai`, against a service that the demo starts for itself; a right answer is rewarded on the turn
that gave it.
"""

import time
from contextlib import closing
from itertools import islice
from random import Random
from typing import Any

import click
from rich.console import Console

from learner.study import agent_plot, agent_report
from learner.study.agent_client import AgentClient
from learner.study.agent_report import Run
from learner.study.agent_task import tasks
from learner.study.client import Client
from learner.study.command import Options, options, running
from learner.study.live import Progress, Watch, make_view
from learner.study.server import Operator, Service

SESSIONS = 400
# The critic begins as in the paper. The task never changes, so that every alarm is a false one; seen once in 220
# sessions, it cost 60 to learn again.
SETTINGS = {"RIACHO_LEARNER_CRITIC_WARMUP": "10", "RIACHO_LEARNER_ON_SHIFT": "none"}


def play(service: Service, seed: int, sessions: int, console: Console, started: float) -> Run:
    """All sessions, one after the other, against a service that is up."""
    progress = Progress(["right sums"], sessions)
    with (
        closing(Client(service, time.monotonic)) as client,
        closing(Operator(service)) as operator,
        make_view(console) as view,
    ):
        agent = AgentClient(client)
        watch = Watch(service, operator, progress)
        episodes = []
        for task in islice(tasks(Random(seed)), sessions):
            episodes.append(agent.work(task))
            progress.rollouts.append(episodes[-1])
            watch.look()
            view.show(progress)
        client.settle()
        return Run(seed, episodes, operator.updates(), time.monotonic() - started)


@click.command()
@options
@click.option("--sessions", type=click.IntRange(min=1), default=SESSIONS, show_default=True)
def main(sessions: int, **given: Any) -> None:
    """An agent learns to call its calculator from the rewards of its right answers."""
    started = time.monotonic()
    console = Console()
    chosen = Options(**given)
    with running(chosen, console, SETTINGS) as service:
        run = play(service, chosen.seed, sessions, console, started)
    picture = chosen.out / "demo-agent.png"
    agent_plot.draw(run.episodes, run.updates, picture)
    agent_report.show(run, console)
    console.print(f"Plot: {picture}")
    chosen.write(run.as_json())


if __name__ == "__main__":
    main()
