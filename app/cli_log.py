"""`riacho log`: the event log's topics and dead letters."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app import dead_letters
from app.config import load
from app.events.log import EventLog
from app.events.open import kafka_cluster, open_log
from app.events.spool_view import view_spool
from app.settings import AppSettings

EMBEDDED = "the embedded log makes its file itself; topics belong to log_url = kafka://HOST:PORT"

console = Console()


@click.group("log")
def log_group() -> None:
    """The event log."""


@log_group.command("create")
def create() -> None:
    """Make the Kafka topics that are missing."""
    cluster = kafka_cluster(load(AppSettings, {})[0])
    if cluster is None:
        click.echo(EMBEDDED)
        return
    from app.events import kafka_topics

    made = kafka_topics.create(cluster)
    for topic in kafka_topics.wanted(cluster):
        click.echo(f"{topic.name}: {'made' if topic.name in made else 'is there already'}")


@log_group.command("check")
def check() -> None:
    """Compare the Kafka topics with the settings; say for each difference what to do."""
    cluster = kafka_cluster(load(AppSettings, {})[0])
    if cluster is None:
        click.echo(EMBEDDED)
        return
    from app.events import kafka_topics

    faults = kafka_topics.check(cluster)
    for fault in faults:
        click.echo(fault)
    if faults:
        sys.exit(os.EX_CONFIG)
    click.echo(f"{cluster}: the topics are as the settings want them")


@log_group.command("spool")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def spool(as_json: bool) -> None:
    """Show what waits for the log on this machine, and the events that the log refused."""
    view = view_spool(load(AppSettings, {})[0].spool_path)
    if as_json:
        click.echo(json.dumps(asdict(view)))
        return
    click.echo(f"{view.events} events ({view.bytes} bytes) wait for the log")
    table = Table("refused", "bytes", "reason")
    for event in view.refused:
        table.add_row(str(event.id), str(event.bytes), Text(event.reason))
    if view.refused:
        console.print(table)


@log_group.command("dead")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def dead(as_json: bool) -> None:
    """List the dead letters."""
    with _log() as log:
        letters = log.dead_letters()
    if as_json:
        for letter in letters:
            fields = {"id": letter.id, "position": str(letter.position), "reason": letter.reason}
            click.echo(json.dumps(fields | {"attempts": letter.attempts, "at": letter.at.isoformat()}))
        return
    table = Table("id", "position", "attempts", "reason")
    for letter in letters:
        table.add_row(str(letter.id), str(letter.position), str(letter.attempts), Text(letter.reason))
    console.print(table)


@log_group.command("show")
@click.argument("id", type=dead_letters.ID)
def show(id: int) -> None:
    """Show a dead letter with its payload."""
    with _log() as log:
        click.echo(dead_letters.show(log, id))


@log_group.command("replay")
@click.argument("id", type=dead_letters.ID)
def replay(id: int) -> None:
    """Put a dead letter on the log again, as it came."""
    with _log() as log:
        position = dead_letters.replay(log, id)
    click.echo(f"dead letter {id} is on the log again at {position}")


@log_group.command("drop")
@click.argument("id", type=dead_letters.ID)
def drop(id: int) -> None:
    """Take a dead letter out for good."""
    with _log() as log:
        dead_letters.drop(log, id)
    click.echo(f"dead letter {id} is dropped")


@contextmanager
def _log() -> Iterator[EventLog]:
    log = open_log(load(AppSettings, {})[0])
    try:
        yield log
    finally:
        log.close()
