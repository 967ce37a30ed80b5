"""What this machine must have: room, directories that can be written, the base model, packages."""

import json
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from app.doctor.findings import Finding, look
from app.fingerprint import fingerprint, model_directory
from app.settings import AppSettings

FULL_MIB, SCARCE_MIB = 256, 2048
LOCAL_PACKAGES = ("torch", "transformers", "peft", "safetensors")


def check_machine(settings: AppSettings) -> list[Finding]:
    """The findings about directories, disk and model."""
    store = settings.resolved_adapter_store
    return [
        look(
            "home",
            "give it to the user that runs Riacho, or set RIACHO_HOME",
            lambda: writable("home", settings.home),
        ),
        look(
            "adapter store",
            "give it to the user that runs Riacho, or set RIACHO_ADAPTER_STORE",
            lambda: writable("adapter store", store),
        ),
        look("disk", "mend the path", lambda: disk({settings.home, store})),
        look("model", "set RIACHO_MODEL to what save_pretrained wrote", lambda: model(settings.model)),
    ]


def writable(check: str, directory: Path) -> Finding:
    """A file can be made in the directory or, where it is yet to be made, in its nearest ancestor.

    Raises OSError.
    """
    with tempfile.TemporaryFile(dir=_existing(directory)):
        made = "can be written" if directory.exists() else "can be made"
    return Finding(check, "ok", f"{directory} {made}")


def disk(directories: set[Path]) -> Finding:
    """The least room under any of the directories; raises OSError."""
    free, directory = min((shutil.disk_usage(_existing(path)).free // 2**20, path) for path in directories)
    found = f"{free} MiB are free under {directory}"
    if free >= SCARCE_MIB:
        return Finding("disk", "ok", found)
    advice = "free disk space, or keep fewer versions (RIACHO_KEEP_VERSIONS); answers are refused on a full disk"
    return Finding("disk", "fail" if free < FULL_MIB else "warn", found, advice)


def model(name: str) -> Finding:
    """The base is here and can chat; raises SetupError."""
    directory = model_directory(name)
    found = f"{directory}, fingerprint {fingerprint(name)[:12]}"
    if _has_chat_template(directory):
        return Finding("model", "ok", found)
    advice = "use a chat model, or put the model's own chat_template.jinja into its directory"
    return Finding("model", "fail", f"{directory} has no chat template", advice)


def local_engine() -> Finding:
    """The local engine's packages are installed; none is imported."""
    missing = [name for name in LOCAL_PACKAGES if find_spec(name) is None]
    if missing:
        return Finding("engine", "fail", f"the local engine needs {', '.join(missing)}", "pip install 'riacho[local]'")
    return Finding("engine", "ok", "local; its packages are installed")


def _existing(path: Path) -> Path:
    """The path, or its nearest ancestor that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _has_chat_template(directory: Path) -> bool:
    if any((directory / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = directory / "tokenizer_config.json"
    try:
        return bool(json.loads(config.read_bytes()).get("chat_template"))
    except (OSError, ValueError):
        return False
