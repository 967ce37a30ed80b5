"""How settings are shown to people."""

import json

import click
from rich.console import Console
from rich.table import Table

from app.settings import Resolved


def show_settings(resolved: Resolved, as_json: bool) -> None:
    """Print every setting with its value and where it came from; secrets stay masked."""
    if as_json:
        click.echo(json.dumps({"values": dict(resolved.values), "sources": dict(resolved.sources)}))
        return
    table = Table("setting", "value", "from")
    for key, value in resolved.values.items():
        table.add_row(key, str(value), resolved.sources[key])
    Console().print(table)
