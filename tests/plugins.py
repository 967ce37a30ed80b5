"""Installed packages with entry points, for tests: a dist-info directory on the import path, as pip leaves it."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from learner.rewards.load import GROUP

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def built_ins() -> dict[str, str]:
    """The reward functions that this project's metadata lists."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    found: dict[str, str] = project["entry-points"][GROUP]
    return found


def write_metadata(folder: Path, package: str, points: Mapping[str, str]) -> None:
    """The metadata of a package that has these reward functions, as it counts where `folder` is on the import path."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, points: Mapping[str, str]) -> None:
    """Install such a package in this process."""
    write_metadata(folder, package, points)
    monkeypatch.syspath_prepend(folder)
