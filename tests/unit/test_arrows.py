"""The architecture's arrows: who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "peft", "safetensors")
LOCAL_ENGINE = ("app/engines/local.py", "app/engines/adapter_files.py", "app/engines/sampler.py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def offenders(folder: str, *forbidden: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """`file -> module` for each import under `folder` of a forbidden package."""
    rows = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name not in allowed:
            rows += [
                f"{name} -> {module}"
                for module in imports(path)
                if any(module == package or module.startswith(package + ".") for package in forbidden)
            ]
    return rows


def test_app_never_imports_learner() -> None:
    """The serving side does not know the learning side."""
    assert offenders("app", "learner") == []


def test_learner_never_imports_litestar() -> None:
    """The learning side does not know HTTP serving."""
    assert offenders("learner", "litestar", "uvicorn") == []


def test_learner_uses_only_the_shared_parts_of_app() -> None:
    """Of app the learner knows what both sides share: events, registry, settings, errors, the base and the probe."""
    shared = (
        "app.events",
        "app.registry",
        "app.settings",
        "app.config",
        "app.errors",
        "app.base_modules",
        "app.fingerprint",
        "app.probe",
        "app.telemetry",
    )
    rows = offenders("learner", "app")
    assert [row for row in rows if not row.split(" -> ")[1].startswith(shared)] == []


@pytest.mark.parametrize("inner", ["engines", "events", "registry"])
def test_inner_layers_do_not_look_outwards(inner: str) -> None:
    """engines, events and registry know neither the API nor serving."""
    assert offenders(f"app/{inner}", "app.api", "app.serving", "app.asgi", "app.services", "litestar") == []


def test_serving_does_not_know_http() -> None:
    """serving knows neither controllers nor Litestar."""
    assert offenders("app/serving", "app.api", "app.asgi", "app.services", "litestar") == []


def test_heavy_packages_are_imported_by_the_local_engine_only() -> None:
    """Within app only the local engine names torch and its relatives."""
    assert offenders("app", *HEAVY, allowed=LOCAL_ENGINE) == []


def test_app_imports_without_torch() -> None:
    """The serving side starts where torch is not installed."""
    block = "\n".join(f"sys.modules[{name!r}] = None" for name in HEAVY)
    code = f"import sys\n{block}\nimport app.asgi, app.cli, app.serve"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
