"""A fingerprint tells base models apart and nothing else."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from app.errors import SetupError
from app.fingerprint import fingerprint

CONFIG = {"model_type": "llama", "hidden_size": 8, "transformers_version": "5.0.0", "_name_or_path": "/somewhere"}
SIZE = 300_000


def model(directory: Path, *, config: dict[str, Any] | None = None, data: bytes = bytes(SIZE), name: str = "w") -> Path:
    """A model directory with one tensor, written by hand."""
    directory.mkdir(exist_ok=True)
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    ).encode()
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return directory


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    first = fingerprint(model(tmp_path / "a"))
    assert first == fingerprint(str(model(tmp_path / "b")))
    assert len(first) == 64


def test_fields_that_say_nothing_about_the_model_do_not_count(tmp_path: Path) -> None:
    moved = {**CONFIG, "transformers_version": "6.0.0", "_name_or_path": "elsewhere"}
    assert fingerprint(model(tmp_path / "a")) == fingerprint(model(tmp_path / "b", config=moved))


@pytest.mark.parametrize(
    "change",
    [
        {"config": {**CONFIG, "hidden_size": 16}},
        {"name": "other"},
        {"data": bytes(SIZE + 1)},
        {"data": b"\1" + bytes(SIZE - 1)},
        {"data": bytes(SIZE - 1) + b"\1"},
    ],
    ids=["config", "tensor name", "size", "first bytes", "last bytes"],
)
def test_another_model_has_another_fingerprint(tmp_path: Path, change: dict[str, Any]) -> None:
    assert fingerprint(model(tmp_path / "a")) != fingerprint(model(tmp_path / "b", **change))


def test_a_small_change_in_a_small_model_is_seen(tmp_path: Path) -> None:
    """Files of up to 64 KiB are read whole."""
    changed = bytearray(1000)
    changed[500] = 1
    first = fingerprint(model(tmp_path / "a", data=bytes(1000)))
    assert first != fingerprint(model(tmp_path / "b", data=bytes(changed)))


def test_what_is_no_model_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"needs config\.json"):
        fingerprint(tmp_path)
    broken = model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(SetupError, match="no safetensors file"):
        fingerprint(broken)


def test_a_name_that_is_not_in_the_cache_is_refused_with_advice(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(SetupError, match="neither a directory nor in the local Hugging Face cache"):
        fingerprint("nobody/no-such-model")
