"""What tells one base model from another: an adapter means nothing on any base but its own."""

import hashlib
import json
from pathlib import Path
from typing import Any

from app.errors import SetupError
from app.tensor_files import BadTensorFile, TensorFile

_VOLATILE = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})  # they change without the model
_SAMPLE = 64 * 1024


def fingerprint(model: str | Path) -> str:
    """SHA-256 (hex) over a model's config, its tensors' names, shapes and dtypes, and samples of their bytes.

    It reads at most 128 KiB and the header of each weight file, whatever the model's size: another training run
    of the same shape differs, a change of a few bytes in the middle of a file may not.

    Args:
        model: a Hugging Face model directory, or the name of one in the local hub cache.

    Raises:
        SetupError: no such model here, or it has no config.json or no safetensors weights.
    """
    directory = model_directory(model)
    files = sorted(directory.glob("*.safetensors"))
    if not (directory / "config.json").is_file() or not files:
        raise SetupError(
            f"{directory} is no model directory: it needs config.json and *.safetensors. Point RIACHO_MODEL at "
            "what save_pretrained wrote (safetensors, not pickled weights)."
        )
    config = json.loads((directory / "config.json").read_bytes())
    parts: list[object] = [{key: value for key, value in config.items() if key not in _VOLATILE}]
    for path in files:
        parts.append([path.name, path.stat().st_size, *_outline(path)])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _outline(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """A safetensors file's header, and a hash over the first and last bytes of its data."""
    try:
        header = TensorFile.open(path)
    except BadTensorFile as error:
        raise SetupError(f"{error}; copy the model again.") from error
    with path.open("rb") as file:
        file.seek(header.data)
        sample = hashlib.sha256(file.read(_SAMPLE))
        file.seek(max(header.data, path.stat().st_size - _SAMPLE))
        sample.update(file.read(_SAMPLE))
    return header.tensors, sample.hexdigest()


def model_directory(model: str | Path) -> Path:
    """Where a model's files are; raises SetupError where they are not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise SetupError(
            f"{model} is no directory, and huggingface_hub, which could find it by name, is not installed: "
            "pip install 'riacho[local]'."
        ) from error
    try:
        return Path(snapshot_download(str(model), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise SetupError(
            f"There is no model {model}: it is neither a directory nor in the local Hugging Face cache. "
            "Check RIACHO_MODEL, or download it with `hf download`."
        ) from error
