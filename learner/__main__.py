"""The learner's process: `python -m learner run` and `python -m learner replay`."""

import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch

from app.config import load, show_settings
from app.errors import RiachoError, SetupError
from app.events.open import open_log
from app.events.schema import RollbackEvent
from app.fingerprint import fingerprint
from app.registry import Registry
from app.registry.database import upgrade
from app.registry.errors import LeaseLost, RegistryUnavailable
from app.telemetry import logs
from learner.critic import make_policy_and_critic
from learner.guarded import Guarded
from learner.joins import Joins, OnFailure
from learner.lease import LeaseKeeper
from learner.loop import Learner, stop_at_end, wait
from learner.models import load_base
from learner.publisher import Publisher
from learner.rewards.load import load as load_scorer
from learner.scoring import Scoring
from learner.selfcheck import check_logprobs
from learner.settings import LearnerSettings
from learner.signals import Signals
from learner.stream import StreamState
from learner.trainer import Trainer

OnRollback = Callable[[RollbackEvent], None]

log = logging.getLogger("learner")


def build(
    settings: LearnerSettings,
    registry: Registry,
    on_rollback: OnRollback = lambda event: None,
    show_progress: bool = True,
    scoring: Scoring | None = None,
) -> Learner:
    """Wire a learner over the settings' log, base model and adapter store."""
    table = settings.learner
    torch.set_num_threads(table.threads)
    torch.use_deterministic_algorithms(True)
    registry.policies.ensure(
        settings.policy, settings.model, fingerprint(settings.model), settings.reward_min, settings.reward_max
    )
    base = load_base(settings.model)
    policy, critic = make_policy_and_critic(base, table.training)
    gap = check_logprobs(policy)
    band = table.training.band
    log.info("self-check: |delta logprob| %.1e; ratios accepted in (%g, %g)", gap, band.lower, band.upper)
    weights = {signal: reward.weight for signal, reward in settings.rewards.items()}
    signals = Signals(weights, settings.reward_min, settings.reward_max)
    joins = Joins(timedelta(seconds=settings.feedback_ttl_s), on_failure(settings))
    return Learner(
        settings.policy,
        open_log(settings),
        registry,
        Trainer(policy, critic, table.training, signals.combined_range, time.perf_counter),
        Publisher(registry, settings.policy, settings.model, settings.resolved_adapter_store),
        StreamState(joins),
        policy.vocabulary,
        on_rollback,
        show_progress,
        signals,
        scoring,
    )


def on_failure(settings: LearnerSettings) -> dict[str, OnFailure]:
    """What becomes of sessions that a signal's scorer cannot score."""
    return {signal: reward.on_failure for signal, reward in settings.scorers.items()}


def start_scoring(settings: LearnerSettings) -> Scoring | None:
    """Threads that score complete sessions, where a signal names a scorer; raises SetupError for one that is none."""
    table, low, high = settings.learner, settings.reward_min, settings.reward_max
    functions = {
        signal: Guarded(load_scorer(reward.scorer or "", reward.options), table.score_timeout_s, low, high)
        for signal, reward in settings.scorers.items()
    }
    if not functions:
        return None
    scoring = Scoring(settings.policy, open_log(settings), functions, on_failure(settings), table.score_retry_s)
    scoring.start(table.score_workers)
    return scoring


def run(settings: LearnerSettings, until_end: bool, repeat_rollbacks: bool = False) -> None:
    """Hold the lease and learn until a signal or, with `until_end`, the end of the log.

    If the lease is lost or the registry is away, wait for it and begin again from the newest checkpoint.
    With `until_end` only scores that are on the log count: nothing is scored. With `repeat_rollbacks` the registry is
    a replay's own, so that a rollback on the log moves its pointer too.
    """
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    registry = Registry.open(settings.resolved_database_url)

    def repeat(event: RollbackEvent) -> None:
        if registry.policies.get(settings.policy).epoch < event.epoch:
            registry.versions.rollback(settings.policy, event.to, "replay", event.reason, lambda _: event)

    scoring = None if until_end else start_scoring(settings)
    on_rollback = repeat if repeat_rollbacks else lambda event: None
    learner = build(settings, registry, on_rollback, not repeat_rollbacks, scoring)
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    table = settings.learner

    def waiting(other: str) -> None:
        if stopping:
            sys.exit(os.EX_OK)
        log.info("waiting: %s holds the learner's lease", other)

    def hold_and_learn() -> bool:
        """Whether it is done; false where the lease was lost."""
        with LeaseKeeper(registry, f"learner:{settings.policy}", holder, table.lease_s, waiting) as keeper:
            learner.resume(keeper.lease)
            idle = stop_at_end if until_end else wait(table.poll_s)
            learner.run(lambda: not stopping and not keeper.lost, idle)
        return not keeper.lost

    done = False
    try:
        while not (done or stopping):
            try:
                done = hold_and_learn()
            except (LeaseLost, RegistryUnavailable) as error:
                log.warning("learning begins again from the newest checkpoint: %s", error)
                time.sleep(table.lease_s / 5)
    finally:
        if scoring is not None:
            scoring.close()


@click.group()
def main() -> None:
    """The learning side of Riacho."""
    logs.setup("learner")


@main.command("run")
@click.option("--until-end", is_flag=True, help="Stop at the end of the log instead of waiting for more.")
def run_command(until_end: bool) -> None:
    """Learn from the log as events come."""
    settings, resolved = load(LearnerSettings, {})
    log.info("settings: %s", resolved)
    run(settings, until_end)


@main.command()
@click.option("--json", "as_json", is_flag=True)
def config(as_json: bool) -> None:
    """Show the learner's resolved settings and where each came from."""
    _, resolved = load(LearnerSettings, {})
    show_settings(resolved, as_json)


@main.command()
@click.option("--log", "log_url", required=True, help="The log to read, such as sqlite:////path/to/log.db.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the replay's own versions.")
def replay(log_url: str, out: Path) -> None:
    """Fold a log from its beginning into a fresh learner: the same settings give the same versions."""
    if (out / "registry.db").exists():
        raise SetupError(f"{out} already holds a replay; give an empty folder", param="out")
    options: dict[str, Any] = {"home": out, "log_url": log_url, "database_url": "", "adapter_store": out / "adapters"}
    settings, _ = load(LearnerSettings, options)
    out.mkdir(parents=True, exist_ok=True)
    upgrade(settings.resolved_database_url)
    run(settings, until_end=True, repeat_rollbacks=True)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except SetupError as error:
        click.echo(f"riacho: {error.message}", err=True)
        sys.exit(os.EX_CONFIG)
    except RiachoError as error:
        click.echo(f"riacho: {error.message}", err=True)
        sys.exit(os.EX_TEMPFAIL)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
