"""How settings are resolved: from riacho.toml, then RIACHO_* variables, then command options.

Later sources win. A key that no process knows is an error, so that a typing mistake is never a silent default.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from app.errors import SetupError
from app.settings import AppSettings, SharedSettings

ENV_PREFIX = "RIACHO_"
TABLES = ("learner", "kafka")  # RIACHO_LEARNER_SEED is seed in [learner]
# RIACHO_REWARDS_JUDGE_OPTIONS_MODEL is model in [rewards.judge.options]; the shortest name of a signal wins.
REWARD_KEY = re.compile(r"rewards_(.+?)_(weight|scorer|on_failure|options_(.+))")
CONFIG_FILE = "riacho.toml"
PASSWORD = re.compile(r"(://[^/?#:@]*:)[^?]*(?=@)|([?&]password=)[^&]*")
SECRET_OPTION = re.compile(r"rewards\.[^.]+\.options\.(.*[._])?(key|token|secret|password)")

S = TypeVar("S", bound=SharedSettings)
Source = Literal["default", "file", "environment", "option"]


@dataclass(frozen=True)
class Resolved:
    """Settings with, for each dotted key, the value and where it came from."""

    values: Mapping[str, Any]
    sources: Mapping[str, Source]

    def __str__(self) -> str:
        """What differs from the defaults, on one line."""
        given = [
            f"{key} = {value} ({self.sources[key]})"
            for key, value in self.values.items()
            if self.sources[key] != "default"
        ]
        return "; ".join(given) or "all defaults"


def load(cls: type[S], options: Mapping[str, Any], env: Mapping[str, str] | None = None) -> tuple[S, Resolved]:
    """Resolve one process's settings; raises SetupError that names the key, the value and what would be right."""
    env = os.environ if env is None else env
    layers: list[tuple[Source, dict[str, Any]]] = [
        ("file", _from_file(env)),
        ("environment", _from_env(env)),
        ("option", {key: value for key, value in options.items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers:
        for key, value in _flatten(layer).items():
            _put(merged, key, value)
            sources[key] = source
    _refuse_unknown(set(merged), cls)
    settings = _validate(cls, {key: value for key, value in merged.items() if key in cls.model_fields})
    values = {key: _masked(key, value) for key, value in _flatten(settings.model_dump(mode="json")).items()}
    return settings, Resolved(values, {key: sources.get(key, "default") for key in values})


def _masked(key: str, value: Any) -> Any:
    """A value as it may be shown: the passwords in addresses and what reward functions log in with are taken out."""
    if SECRET_OPTION.fullmatch(key):
        return "***"
    return PASSWORD.sub(r"\1\2***", value) if isinstance(value, str) else value


def _validate(cls: type[S], values: dict[str, Any]) -> S:
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            key = ".".join(str(part) for part in item["loc"])
            why = item["msg"].removeprefix("Value error, ")
            given = "" if isinstance(item["input"], dict) else f"{key} = {item['input']!r}: "
            lines.append(given + why)
        raise SetupError("settings: " + "; ".join(lines)) from error


def _from_file(env: Mapping[str, str]) -> dict[str, Any]:
    named = env.get("RIACHO_CONFIG")
    path = Path(named or CONFIG_FILE)
    if not path.exists():
        if named:
            raise SetupError(f"RIACHO_CONFIG = {named}: there is no such file")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{path}: {error}") from error


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in env.items():
        if not name.startswith(ENV_PREFIX) or name == "RIACHO_CONFIG" or name.startswith("RIACHO_TEST_"):
            continue
        key = name.removeprefix(ENV_PREFIX).lower()
        table, _, inner = key.partition("_")
        reward = REWARD_KEY.fullmatch(key)
        if reward:
            signal, field, option = reward.groups()
            keys = ("options", option) if option else (field,)
            _put(found, ".".join(("rewards", signal, *keys)), value)
        elif table in TABLES and inner:
            found.setdefault(table, {})[inner] = value
        else:
            found[key] = value
    return found


def _refuse_unknown(given: set[str], cls: type[SharedSettings]) -> None:
    """Both processes read the same sources: each leaves the other's keys alone and refuses what is nobody's."""
    known = {*cls.model_fields, *AppSettings.model_fields, "learner"}
    for name in sorted(given - known):
        raise SetupError(
            f"unknown setting {name!r} ({ENV_PREFIX}{name.upper()} as a variable); known: {', '.join(sorted(known))}",
            param=name,
        )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:  # an empty table is a value: a signal with nothing but defaults
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value


def show_settings(resolved: Resolved, as_json: bool) -> None:
    """Print every setting with its value and where it came from; secrets stay masked."""
    if as_json:
        click.echo(json.dumps({"values": dict(resolved.values), "sources": dict(resolved.sources)}))
        return
    table = Table("setting", "value", "from")
    for key, value in resolved.values.items():
        table.add_row(key, str(value), resolved.sources[key])
    Console().print(table)
