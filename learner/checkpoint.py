"""Checkpoints: one immutable directory a version, with all that the learner needs to go on from there.

    42/                                              version 42; 42.1, 42.2, … if another attempt had taken the name

    adapter_config.json, adapter_model.safetensors   the policy's adapter, as peft and vLLM read it
    critic.safetensors                               what of the critic trains, the value head included
    optimizer.safetensors                            both AdamW states
    probe.json                                       by which an engine proves that it applies the adapter
    learner.json                                     running numbers, pending joins, log positions, counters

The same state gives the same bytes.
"""

import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from app.errors import SetupError
from app.probe import FILE as PROBE
from app.registry.errors import LeaseLost
from learner.probe import measure
from learner.shift import ShiftDetector
from learner.trainer import Trainer, TrainerStats

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CRITIC = "critic.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "learner.json"
FILES = (ADAPTER_CONFIG, ADAPTER, PROBE, CRITIC, OPTIMIZER, STATE)


def write(directory: Path, trainer: Trainer, base_model: str, stream: Mapping[str, Any]) -> tuple[Path, str]:
    """Write a checkpoint aside, fsync it and rename it into place; where it is, and the SHA-256 over its files.

    Nothing is ever replaced, since a learner that was paused and lost its lease may wake up here at any moment.
    A directory with these very files is used as it is; where other files have the name, the next free one of
    `NAME.1`, `NAME.2`, … is taken. Raises LeaseLost if the files vanish while they are written: only clean-up
    after a newer learner removes them.
    """
    contents = serialize(trainer, base_model, stream)
    try:
        return _place(_write_aside(directory, contents), directory, contents), digest(contents)
    except FileNotFoundError as error:
        raise LeaseLost(f"{error.filename} was cleaned up while it was written: another learner is at work") from error
    except OSError as error:
        raise SetupError(
            f"the checkpoint {directory} cannot be written ({error.strerror}): free disk space or mend "
            "the permissions; the learner resumes from the newest version, and nothing is lost"
        ) from error


def _write_aside(directory: Path, contents: Mapping[str, bytes]) -> Path:
    aside = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}.part")
    aside.mkdir(parents=True)
    try:
        for name, data in contents.items():
            with (aside / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        _fsync_directory(aside)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def _place(aside: Path, directory: Path, contents: Mapping[str, bytes]) -> Path:
    others = (directory.with_name(f"{directory.name}.{attempt}") for attempt in itertools.count(1))
    place = next(place for place in itertools.chain([directory], others) if _take(aside, place, contents))
    _fsync_directory(place.parent)
    return place


def _take(aside: Path, place: Path, contents: Mapping[str, bytes]) -> bool:
    """Whether the name was free, which only the rename itself can say, or holds the same files already."""
    try:
        aside.rename(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _holds(place, contents):
            return False
        shutil.rmtree(aside)
    return True


def _holds(directory: Path, contents: Mapping[str, bytes]) -> bool:
    return all((directory / name).is_file() and (directory / name).read_bytes() == contents[name] for name in contents)


def serialize(trainer: Trainer, base_model: str, stream: Mapping[str, Any]) -> dict[str, bytes]:
    """The checkpoint's files as bytes, in the order of FILES."""
    state = {"trainer": asdict(trainer.stats), "detector": asdict(trainer.detector), "stream": dict(stream)}
    return {
        ADAPTER_CONFIG: _adapter_config(trainer, base_model),
        ADAPTER: save(trainer.policy.state(), metadata={"format": "pt"}),
        PROBE: measure(trainer.policy).encode(),
        CRITIC: save(trainer.critic.state()),
        OPTIMIZER: save(_optimizer_state(trainer)),
        STATE: json.dumps(state, allow_nan=False).encode(),
    }


def digest(contents: Mapping[str, bytes]) -> str:
    """SHA-256 over the names and bytes of the files."""
    sha = hashlib.sha256()
    for name, data in contents.items():
        sha.update(f"{name} {len(data)}\n".encode())
        sha.update(data)
    return sha.hexdigest()


def read_trainer(directory: Path, trainer: Trainer) -> None:
    """Restore policy, critic, optimizers and running numbers; raises SetupError on a broken checkpoint."""
    state = _read_state(directory)
    trainer.policy.load_state(_tensors(directory / ADAPTER))
    trainer.critic.load_state(_tensors(directory / CRITIC))
    _load_optimizer_state(trainer, _tensors(directory / OPTIMIZER))
    trainer.stats = TrainerStats(
        **{**state["trainer"], "value_pairs": [(v, r) for v, r in state["trainer"]["value_pairs"]]}
    )
    trainer.detector = ShiftDetector(**state["detector"])


def read_stream(directory: Path) -> dict[str, Any]:
    """The stream's part of a checkpoint; raises SetupError on a broken one."""
    return _read_state(directory)["stream"]


def _read_state(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(directory / STATE, error) from error


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> SetupError:
    return SetupError(
        f"the checkpoint {path} cannot be read ({error}); restore it from a backup, "
        "or roll the policy back to a version whose files are whole"
    )


def _adapter_config(trainer: Trainer, base_model: str) -> bytes:
    """peft's configuration with its sets sorted: their order changes from process to process."""
    config = trainer.policy.config.to_dict() | {"base_model_name_or_path": base_model, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return json.dumps(plain, sort_keys=True, indent=1, default=str).encode()


def _optimizers(trainer: Trainer) -> list[tuple[str, torch.optim.Optimizer, dict[str, nn.Parameter]]]:
    return [
        ("policy", trainer.policy_optimizer, trainer.policy.parameters()),
        ("critic", trainer.critic_optimizer, trainer.critic.parameters()),
    ]


def _optimizer_state(trainer: Trainer) -> dict[str, Tensor]:
    """AdamW's moments and step counts under `policy|critic/MOMENT/PARAMETER`."""
    return {
        f"{owner}/{moment}/{name}": tensor.detach().cpu().contiguous().clone()
        for owner, optimizer, parameters in _optimizers(trainer)
        for name, parameter in parameters.items()
        for moment, tensor in optimizer.state.get(parameter, {}).items()
    }


def _load_optimizer_state(trainer: Trainer, tensors: Mapping[str, Tensor]) -> None:
    for owner, optimizer, parameters in _optimizers(trainer):
        optimizer.state.clear()
        for name, parameter in parameters.items():
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                tensor = tensors.get(f"{owner}/{moment}/{name}")
                if tensor is not None:
                    optimizer.state[parameter][moment] = tensor.clone()


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
