"""A short demo as a process, and what its report must hold whatever it runs on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.service import environment

ROLLOUTS = 6
LIMIT_S = 600.0


def short_demo(folder: Path, *options: str, **variables: str) -> dict[str, Any]:
    """The JSON of `riacho demo` with a few rollouts a phase."""
    return run_demo(folder, "demo", "--rollouts", str(ROLLOUTS), *options, **variables)


def run_demo(folder: Path, name: str, *options: str, **variables: str) -> dict[str, Any]:
    """The JSON of a demo with seed 3, its pictures in `out`; fails with its output where it does."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "app.cli", name, "--seed", "3"]
    command += ["--out", str(folder / "out"), "--home", str(folder / "home"), "--json", str(report), *options]
    done = subprocess.run(
        command,
        env=environment(folder, variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def assert_complete(report: dict[str, Any]) -> None:
    """Three phases, an update for every rollout, versions from them, reactions and a rollback to one of them."""
    assert report["seed"] == 3
    assert [(p["style"], p["rollouts"]) for p in report["phases"]] == [
        ("cute", ROLLOUTS),
        ("chuunibyou", ROLLOUTS),
        ("classical", ROLLOUTS),
    ]
    assert report["updates"] == 3 * ROLLOUTS
    assert 0 < report["rollback"]["to"] <= report["versions"] <= report["updates"]
    assert 0 < report["reaction_s"]["p50"] <= report["reaction_s"]["p95"]
    assert report["rollback_s"] > 0
    assert 0 <= report["masked_fraction"] < 0.05
