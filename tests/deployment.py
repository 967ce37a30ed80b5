"""Reads deploy/ as its tools do: Compose files, Kubernetes objects, PromQL."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from app.config import load
from app.settings import AppSettings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MODEL = "/models/base"
_VARIABLE = re.compile(r"\$\{(\w+)(?::(-|\?)([^}]*))?\}")


def compose(given: Mapping[str, str]) -> dict[str, Any]:
    """deploy/compose.yaml with its variables filled in; raises KeyError for one that must be given and is not."""

    def fill(found: re.Match[str]) -> str:
        name, kind, default = found.groups()
        if given.get(name):
            return given[name]
        if kind != "-":
            raise KeyError(name)
        return str(default)

    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    file: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(fill, text))
    return file


def objects() -> list[dict[str, Any]]:
    """Every object that deploy/k8s/kustomization.yaml names."""
    kustomization = yaml.safe_load((DEPLOY / "k8s/kustomization.yaml").read_text(encoding="utf-8"))
    texts = [(DEPLOY / "k8s" / name).read_text(encoding="utf-8") for name in kustomization["resources"]]
    return [found for text in texts for found in yaml.safe_load_all(text)]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """(the workload's name, its pod's spec)."""
    for found in objects():
        if "template" in found.get("spec", {}):
            yield found["metadata"]["name"], found["spec"]["template"]["spec"]


def containers(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    """A container's environment, with the ConfigMaps that it takes in."""
    maps = {found["metadata"]["name"]: found["data"] for found in objects() if found["kind"] == "ConfigMap"}
    merged: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        merged |= maps[source["configMapRef"]["name"]]
    return merged | {entry["name"]: entry["value"] for entry in container.get("env", ())}


def resolved(environment: Mapping[str, str], secrets: Path) -> AppSettings:
    """The app's settings under a container's environment, with riacho.toml from `secrets`."""
    settings, _ = load(AppSettings, {}, {**environment, "RIACHO_CONFIG": str(secrets / "riacho.toml")})
    return settings
