"""The `riacho` command."""

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from app.cli_log import log_group
from app.config import load, show_settings
from app.doctor import examine, show_findings
from app.engines.vllm_command import VllmServer, reasons
from app.errors import RiachoError
from app.registry import revisions, upgrade
from app.serve import serve_app
from app.settings import AppSettings
from app.supervisor import supervise
from app.telemetry import logs


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The settings that people set on the command line; the others come from riacho.toml and variables."""
    options = [
        click.option("--home", type=click.Path(path_type=Path), help="State, keys, adapters (RIACHO_HOME)."),
        click.option("--model", help="Base model: a directory or a hub name (RIACHO_MODEL)."),
        click.option("--policy", help="The policy's name (RIACHO_POLICY)."),
        click.option("--host", help="Address to listen on (RIACHO_HOST)."),
        click.option("--port", type=int, help="Port to listen on (RIACHO_PORT)."),
        click.option("--auth/--no-auth", default=None, help="--no-auth only on a loopback address."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def cli() -> None:
    """A language-model service that learns while it serves."""
    logs.setup("app")


@cli.command()
@settings_options
def up(**options: Any) -> None:
    """Start the API and the learner, migrating the registry first."""
    settings, _ = load(AppSettings, options)
    settings.home.mkdir(parents=True, exist_ok=True)
    upgrade(settings.resolved_database_url)
    env = {**os.environ, **_as_variables(options)}
    sys.exit(supervise(env))


@cli.command()
@settings_options
def serve(**options: Any) -> None:
    """Start the API alone."""
    settings, resolved = load(AppSettings, options)
    logging.getLogger("app").info("settings: %s", resolved)
    serve_app(settings)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def learn(args: tuple[str, ...]) -> None:
    """Start the learner alone (--until-end stops at the end of the log)."""
    _become("learner", "run", *args)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def replay(args: tuple[str, ...]) -> None:
    """Fold a log into a fresh learner offline: riacho replay --log URL --out DIR."""
    _become("learner", "replay", *args)


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def demo(args: tuple[str, ...]) -> None:
    """Simulated users whose preference moves, against a service of its own."""
    _become("learner.study.demo", *args)


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def demo_agent(args: tuple[str, ...]) -> None:
    """An agent that learns to use its tool, against a service of its own."""
    _become("learner.study.agent_demo", *args)


@cli.command(epilog="\b\nWhat the server is always started with, and why:\n" + reasons())
@click.option("--model", required=True, help="The base model's directory, the same as RIACHO_MODEL.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Keep it off public networks: anyone can load.")
@click.option("--port", type=int, default=8000, show_default=True)
@click.option("--cpu", is_flag=True, help="For vLLM's CPU build.")
@click.option("--slots", type=int, default=8, show_default=True, help="Versions in memory; the app's `slots`, or more.")
@click.option("--batch-loras", type=int, default=2, show_default=True, help="Versions in one batch; the others wait.")
@click.option("--max-rank", type=int, default=16, show_default=True, help="Adapters of a larger rank are refused.")
@click.option("--max-context", type=int, help="Prompt and answer together; the model's own by default.")
@click.option("--tool-parser", default="hermes", show_default=True, help="How this model writes tool calls.")
@click.option("--reasoning-parser", help="How this model writes its reasoning, such as qwen3; all is answer without.")
@click.option("--kv-cache-mib", type=int, help="Memory of the KV cache; vLLM's own choice by default, 256 with --cpu.")
@click.option("--python", default=sys.executable, help="The interpreter of vLLM's environment, if it has its own.")
@click.option("--print", "print_only", is_flag=True, help="Print the command and do not run it.")
@click.argument("extra", nargs=-1)
def vllm(print_only: bool, **options: Any) -> None:
    """Start a vLLM server that Riacho can learn from; options of vLLM's own follow after `--`."""
    server = VllmServer(**options)
    command, variables = server.command(), server.variables()
    if server.exposed():
        click.echo(f"riacho: whoever reaches {server.host} can load adapters; keep it private", err=True)
    if print_only:
        click.echo(shlex.join([*(f"{name}={value}" for name, value in variables.items()), *command]))
        return
    os.execve(command[0], command, {**os.environ, **variables})


@cli.group()
def db() -> None:
    """The registry's database."""


@db.command("upgrade")
def db_upgrade() -> None:
    """Migrate the registry to this code's revision."""
    settings, _ = load(AppSettings, {})
    settings.home.mkdir(parents=True, exist_ok=True)
    before, after = upgrade(settings.resolved_database_url)
    click.echo(f"registry: {before or 'empty'} -> {after}")


@db.command("status")
def db_status() -> None:
    """Show the registry's revision and this code's."""
    settings, _ = load(AppSettings, {})
    current, head = revisions(settings.resolved_database_url)
    click.echo(f"registry: {current or 'empty'}, this code: {head}")


cli.add_command(log_group)


@cli.command()
@settings_options
@click.option("--json", "as_json", is_flag=True)
def doctor(as_json: bool, **options: Any) -> None:
    """Look at all that this installation depends on; say what is wrong and what to do. Status 1 if something is."""
    findings = asyncio.run(examine(options))
    show_findings(findings, as_json)
    sys.exit(any(finding.status == "fail" for finding in findings))


@cli.command()
@settings_options
@click.option("--json", "as_json", is_flag=True)
@click.option("--learner", is_flag=True, help="The learner's settings, its hyper-parameters among them.")
def config(as_json: bool, learner: bool, **options: Any) -> None:
    """Show the resolved settings and where each came from."""
    if learner:
        os.environ.update(_as_variables(options))
        _become("learner", "config", *(["--json"] if as_json else []))
    _, resolved = load(AppSettings, options)
    show_settings(resolved, as_json)


def _become(module: str, *args: str) -> NoReturn:
    """Go on as a module of the learning side, which the app never imports; signals reach it directly."""
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


def _as_variables(options: dict[str, Any]) -> dict[str, str]:
    """Hand options on to child processes, which resolve the same settings."""
    given = {key: value for key, value in options.items() if value is not None}
    return {f"RIACHO_{key.upper()}": str(value) for key, value in given.items()}


def main() -> None:
    try:
        cli(standalone_mode=False)
    except RiachoError as error:
        sys.exit(f"riacho: {error.message}")
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


if __name__ == "__main__":
    main()
