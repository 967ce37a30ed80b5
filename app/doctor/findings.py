"""What a check found, and how a check that fails stays one finding."""

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import click
from sqlalchemy.exc import DBAPIError

from app.errors import RiachoError
from app.tensor_files import BadTensorFile

Status = Literal["ok", "warn", "fail"]
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found and, unless all is well, what to do about it."""

    check: str
    status: Status
    found: str
    advice: str = ""


def look(check: str, advice: str, run: Callable[[], Finding]) -> Finding:
    """Run a check; what files, databases and settings can do wrong is a failure with this advice."""
    try:
        return run()
    except RiachoError as error:
        return Finding(check, "fail", error.message, advice)
    except DBAPIError as error:
        return Finding(check, "fail", str(error.orig), advice)
    except (OSError, sqlite3.Error, BadTensorFile) as error:
        return Finding(check, "fail", str(error), advice)


def show_findings(findings: Sequence[Finding], as_json: bool) -> None:
    """Print findings for people, or as one JSON array."""
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
        return
    for finding in findings:
        status = click.style(f"{finding.status:5}", fg=_COLOURS[finding.status])
        click.echo(f"{status}{finding.check:14}{finding.found}")
        if finding.advice:
            click.echo(f"{'':19}-> {finding.advice}")
