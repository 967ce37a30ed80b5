"""What `riacho log show`, `replay` and `drop` do."""

import asyncio
import base64
import json

import click

from app.errors import SetupError
from app.events.log import EventLog, Position

ID = click.IntRange(0, 2**63 - 1)


def show(log: EventLog, id: int) -> str:
    """All there is to know of a dead letter, for people; raises SetupError for an unknown id."""
    try:
        letter = log.dead_letter(id)
    except KeyError:
        raise _unknown(id) from None
    return "\n".join(
        [
            f"id        {letter.id}",
            f"position  {letter.position}",
            f"reason    {letter.reason}",
            f"attempts  {letter.attempts}",
            f"at        {letter.at.isoformat()}",
            f"payload   {_readable(letter.payload)}",
        ]
    )


def replay(log: EventLog, id: int) -> Position:
    """Put a dead letter on the log again; raises SetupError for an unknown id."""
    try:
        return asyncio.run(log.replay_dead_letter(id))
    except KeyError:
        raise _unknown(id) from None


def drop(log: EventLog, id: int) -> None:
    """Take a dead letter out for good; raises SetupError for an unknown id."""
    try:
        log.drop_dead_letter(id)
    except KeyError:
        raise _unknown(id) from None


def _readable(payload: bytes) -> str:
    """JSON indented; anything else in base64, since a terminal must not obey it."""
    try:
        return json.dumps(json.loads(payload), indent=2)
    except (ValueError, RecursionError):
        return f"{len(payload)} bytes, no JSON; in base64: {base64.b64encode(payload).decode()}"


def _unknown(id: int) -> SetupError:
    return SetupError(f"there is no dead letter {id}; `riacho log dead` lists them")
