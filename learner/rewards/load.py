"""Finds a reward function by name among the installed ones."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from app.errors import SetupError
from learner.rewards.view import Factory, RewardFunction

GROUP = "riacho.rewards"


def load(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """The reward function of that name with these options.

    Raises SetupError where none or more than one is installed under the name, where it cannot be imported, and where
    it refuses an option, which is then named.
    """
    factory = _factory(name)
    try:
        return factory(options)
    except ValidationError as error:
        items = error.errors(include_url=False)
        where = ".".join(str(part) for part in items[0]["loc"])
        raise SetupError(
            f"scorer {name!r}: " + "; ".join(map(_reason, items)), param=f"options.{where}" if where else "options"
        ) from error


def _reason(item: Mapping[str, Any]) -> str:
    """Names the option and, unless it is text, its value: text may be a key that was pasted into the wrong place."""
    option = ".".join(str(part) for part in item["loc"]) or "options"
    value = item["input"]
    given = f" = {value!r}" if isinstance(value, int | float) else ""
    return f"{option}{given}: {item['msg'].removeprefix('Value error, ')}"


def _factory(name: str) -> Factory:
    installed = entry_points(group=GROUP)
    found: dict[str, EntryPoint] = {point.value: point for point in installed if point.name == name}
    if not found:
        known = ", ".join(sorted(installed.names)) or "none"
        raise SetupError(f"scorer = {name!r}: no such reward function is installed; known: {known}", param="scorer")
    if len(found) > 1:
        raise SetupError(
            f"scorer = {name!r}: installed more than once: {', '.join(sorted(found))}; "
            "uninstall the package that should not provide it",
            param="scorer",
        )
    (point,) = found.values()
    try:
        factory: Factory = point.load()
    except (ImportError, AttributeError) as error:
        raise SetupError(f"scorer = {name!r}: {point.value} cannot be imported: {error}", param="scorer") from error
    return factory
