"""Settings: one typed class a process, resolved from riacho.toml, RIACHO_* variables and command options.

Later sources win. A key that no process knows is an error, so that a typing mistake is never a silent default.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from app.errors import SetupError

ENV_PREFIX = "RIACHO_"
LEARNER_ENV_PREFIX = "RIACHO_LEARNER_"
CONFIG_FILE = "riacho.toml"
TINY_MODEL = Path(__file__).parent / "models" / "tiny-qwen3"


class SharedSettings(BaseModel):
    """What the app and the learner must agree on."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    home: Path = Field(Path("~/.riacho"), description="state, keys, adapters, spool")
    log_url: str = Field("", description="the event log; empty = sqlite:///HOME/log.db")
    database_url: str = Field("", description="the registry; empty = sqlite:///HOME/registry.db")
    adapter_store: Path | None = Field(None, description="adapter versions; empty = HOME/adapters")
    policy: str = Field("riacho", pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$", description="the policy's name")
    model: str = Field(str(TINY_MODEL), description="base model: a directory or a hub name")
    reward_min: float = Field(0.0, allow_inf_nan=False, description="a thumb down")
    reward_max: float = Field(1.0, allow_inf_nan=False, description="a thumb up")
    partitions: int = Field(1, ge=1, le=1024, description="partitions of a new embedded log")
    feedback_ttl_s: float = Field(86_400.0, gt=0, description="event time for which a completion waits for feedback")

    @field_validator("home", "adapter_store")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @model_validator(mode="after")
    def _reward_range(self) -> Self:
        if self.reward_min >= self.reward_max:
            raise ValueError(
                f"reward_min = {self.reward_min} is not below reward_max = {self.reward_max}; "
                "give the range that your rewards have, such as 0 and 1"
            )
        return self

    @property
    def resolved_log_url(self) -> str:
        return self.log_url or f"sqlite:///{self.home / 'log.db'}"

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'registry.db'}"

    @property
    def resolved_adapter_store(self) -> Path:
        return self.adapter_store or self.home / "adapters"


class AppSettings(SharedSettings):
    """The serving process."""

    engine_urls: str = Field("local", description="`local`, or vLLM addresses, comma-separated")
    host: str = "127.0.0.1"
    port: int = Field(8700, ge=0, le=65535)
    auth: bool = Field(True, description="false only on a loopback address")
    admin_key: SecretStr | None = Field(None, description="first admin key; made at first start if absent")
    client_key: SecretStr | None = Field(None, description="first client key; made at first start if absent")
    slots: int = Field(8, ge=2, description="adapter versions that the local engine holds at once")
    engine_threads: int = Field(1, ge=1, description="CPU threads of the local engine")
    keep_versions: int = Field(100, ge=1, description="newest versions whose files stay on disk")
    default_max_tokens: int = Field(256, ge=1, description="max_tokens of a request that names none")
    on_capture_failure: Literal["fail_closed", "fail_open"] = Field(
        "fail_closed", description="an answer that cannot be recorded: refuse it, or let it go and count the loss"
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024)
    poll_s: float = Field(0.1, gt=0, le=1, description="how often the live version is looked up")
    deployer_lease_s: float = Field(10.0, gt=0)

    @model_validator(mode="after")
    def _no_open_door(self) -> Self:
        if not self.auth and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"auth = false on host = {self.host!r} would serve everybody; "
                "use host = 127.0.0.1, or leave authentication on"
            )
        return self


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
        ("environment", _from_env(cls, env)),
        ("option", {key: value for key, value in options.items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers:
        for key, value in _flatten(layer).items():
            _put(merged, key, value)
            sources[key] = source
    known = _keys(cls)
    mine = _pick(merged, known) if cls is AppSettings else _pick_learner(merged, known)
    settings = _validate(cls, mine)
    values = _flatten(settings.model_dump(mode="json"))
    return settings, Resolved(values, {key: sources.get(key, "default") for key in values})


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


def _from_env(cls: type[SharedSettings], env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in env.items():
        if name.startswith(LEARNER_ENV_PREFIX):
            found.setdefault("learner", {})[name.removeprefix(LEARNER_ENV_PREFIX).lower()] = value
        elif name.startswith(ENV_PREFIX) and name != "RIACHO_CONFIG" and not name.startswith("RIACHO_TEST_"):
            found[name.removeprefix(ENV_PREFIX).lower()] = value
    return found


def _keys(cls: type[BaseModel]) -> set[str]:
    return set(cls.model_fields)


def _pick(merged: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The app leaves the learner's table to the learner, which checks it."""
    unknown = set(merged) - known - {"learner"}
    _refuse_unknown(unknown, known)
    return {key: value for key, value in merged.items() if key in known}


def _pick_learner(merged: dict[str, Any], known: set[str]) -> dict[str, Any]:
    _refuse_unknown(set(merged) - known - _keys(AppSettings), known | _keys(AppSettings))
    return {key: value for key, value in merged.items() if key in known}


def _refuse_unknown(unknown: set[str], known: set[str]) -> None:
    if unknown:
        name = sorted(unknown)[0]
        raise SetupError(
            f"unknown setting {name!r} ({ENV_PREFIX}{name.upper()} as a variable); known: {', '.join(sorted(known))}",
            param=name,
        )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value
