"""Checkpoints: the same state gives the same bytes, and a resumed run is an undisturbed one, byte for byte."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from app.errors import SetupError
from app.events.log import Position
from app.probe import Probe
from app.registry.errors import LeaseLost
from app.settings import TINY_MODEL
from learner import checkpoint
from learner.joins import Joined, Joins
from learner.models import load_base
from learner.rollouts import Rollout
from learner.trainer import Trainer
from tests.builders import completion, feedback, moment, new_trainer, recorded, turn

FORMS = pytest.mark.parametrize("form", ["lora", "full"])
BASE = "the-base"
STREAM = {"positions": {"0": 12}, "counters": {"expired": 3}}
BUSY: dict[str, Any] = {"advantage_scale": "rms", "shift_threshold": 1.0, "shift_dead_time": 3}


def _busy_trainer(form: str, seed: int = 0) -> Trainer:
    """With a running advantage scale, and a shift test that has seen enough to raise an alarm."""
    trainer = new_trainer(critic=form, seed=seed, **BUSY)
    for _ in range(12):
        trainer.detector.observe(1.0, trainer.settings)
    return trainer


def _train(trainer: Trainer, first: int, last: int) -> None:
    """Updates whose numbers decide prompts and rewards; several kinds of state come into being."""
    for number in range(first, last):
        asked = turn((5 + number, 6, 7), (300 + number, 41))
        reward = 0.0 if number % 5 == 4 else 1.0
        trainer.update([Rollout(f"s{number}", (recorded(trainer.policy, asked),), reward)])


def _bytes(trainer: Trainer) -> dict[str, bytes]:
    return checkpoint.serialize(trainer, BASE, STREAM)


@FORMS
def test_equal_state_gives_equal_bytes(form: str) -> None:
    """Two learners that did the same from the start write the same files, named as documented, in one order."""
    first, second = (new_trainer(critic=form, **BUSY) for _ in range(2))
    for trainer in (first, second):
        _train(trainer, 0, 2)
    contents = _bytes(first)
    assert tuple(contents) == checkpoint.FILES
    assert contents == _bytes(second)
    assert contents == _bytes(first)


def test_the_same_state_gives_the_same_bytes_in_another_process() -> None:
    """Sets are ordered differently from process to process; the files are not."""
    code = (
        "from tests.builders import new_trainer\nfrom learner import checkpoint\n"
        "print(checkpoint.digest(checkpoint.serialize(new_trainer(), 'the-base', {})))"
    )
    here = checkpoint.digest(checkpoint.serialize(new_trainer(), BASE, {}))
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == here


@FORMS
def test_resumed_run_equals_the_undisturbed_run_byte_for_byte(form: str, tmp_path: Path) -> None:
    """Stopped after 6 of 10 updates and an alarm, read into a learner with other initial weights, and continued."""
    undisturbed = _busy_trainer(form)
    _train(undisturbed, 0, 10)
    stopped = _busy_trainer(form)
    _train(stopped, 0, 6)
    assert (stopped.stats.shifts, undisturbed.stats.shifts) == (1, 2)
    checkpoint.write(tmp_path / "6", stopped, BASE, STREAM)
    resumed = new_trainer(critic=form, seed=99, **BUSY)
    _train(resumed, 20, 21)
    checkpoint.read_trainer(tmp_path / "6", resumed)
    assert _bytes(resumed) == _bytes(stopped)
    _train(resumed, 6, 10)
    assert _bytes(resumed) == _bytes(undisturbed)


def test_going_back_to_a_checkpoint_forgets_what_came_after(tmp_path: Path) -> None:
    """A rollback restores everything into a learner that has gone on, also to a version before its first update."""
    trainer = new_trainer(**BUSY)
    checkpoint.write(tmp_path / "0", trainer, BASE, STREAM)
    before = _bytes(trainer)
    _train(trainer, 0, 3)
    assert _bytes(trainer) != before
    checkpoint.read_trainer(tmp_path / "0", trainer)
    assert _bytes(trainer) == before


def test_files_on_disk_are_the_serialised_bytes_and_the_hash_is_over_them(tmp_path: Path) -> None:
    """The hash is SHA-256 over a line of name and length and the bytes, file by file in the documented order."""
    trainer = new_trainer()
    path, sha256 = checkpoint.write(tmp_path / "store" / "1", trainer, BASE, STREAM)
    assert path == tmp_path / "store" / "1"
    contents = {path.name: path.read_bytes() for path in (tmp_path / "store" / "1").iterdir()}
    assert contents == _bytes(trainer)
    sha = hashlib.sha256()
    for name in checkpoint.FILES:
        sha.update(f"{name} {len(contents[name])}\n".encode() + contents[name])
    assert sha256 == sha.hexdigest()


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_hash_depends_on_every_file(name: str) -> None:
    """One changed byte in any file, or the same bytes under another name, is another hash."""
    contents = {n: n.encode() for n in checkpoint.FILES}
    assert checkpoint.digest({**contents, name: b"?" + contents[name][1:]}) != checkpoint.digest(contents)
    renamed = {("other" if n == name else n): data for n, data in contents.items()}
    assert checkpoint.digest(renamed) != checkpoint.digest(contents)


def test_nothing_is_ever_replaced(tmp_path: Path) -> None:
    """Where other files have the name the next free one is taken, and the same files are used as they are."""
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "adapter_model.safetensors").write_bytes(b"another attempt's")
    trainer = new_trainer()
    path, sha256 = checkpoint.write(tmp_path / "3", trainer, BASE, STREAM)
    assert path == tmp_path / "3.1"
    changed = [entry.stat().st_ctime_ns for entry in path.iterdir()]
    assert checkpoint.write(tmp_path / "3", trainer, BASE, STREAM) == (path, sha256)
    assert [entry.stat().st_ctime_ns for entry in path.iterdir()] == changed
    assert checkpoint.write(tmp_path / "3", trainer, BASE, {**STREAM, "other": 1})[0] == tmp_path / "3.2"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["3", "3.1", "3.2"]
    assert (tmp_path / "3" / "adapter_model.safetensors").read_bytes() == b"another attempt's"


def test_files_cleaned_up_while_they_are_written_mean_a_lost_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that slept until its version was cleaned up starts again instead of calling its settings wrong."""
    sync = os.fsync

    def clean_up(handle: int) -> None:
        sync(handle)
        for left in tmp_path.glob(".3.*.part"):
            shutil.rmtree(left)

    monkeypatch.setattr(os, "fsync", clean_up)
    with pytest.raises(LeaseLost, match="another learner is at work"):
        checkpoint.write(tmp_path / "3", new_trainer(), BASE, STREAM)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_a_setup_error_and_leaves_no_version_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory appears whole or not at all: an error before the last file is on disk leaves none of its name."""
    calls: list[int] = []

    def fail_at_the_third(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail_at_the_third)
    with pytest.raises(SetupError, match="No space left on device") as caught:
        checkpoint.write(tmp_path / "3", new_trainer(), BASE, STREAM)
    assert str(tmp_path / "3") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_every_file_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six files and their directory are fsynced while the name is not there yet, the parent after it is."""
    renamed_at: list[bool] = []
    sync = os.fsync

    def looked_at(handle: int) -> None:
        renamed_at.append((tmp_path / "3").exists())
        sync(handle)

    monkeypatch.setattr(os, "fsync", looked_at)
    checkpoint.write(tmp_path / "3", new_trainer(), BASE, STREAM)
    assert renamed_at == [False] * 7 + [True]


@pytest.mark.parametrize("name", [checkpoint.ADAPTER, checkpoint.CRITIC, checkpoint.OPTIMIZER, checkpoint.STATE])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "garbage"])
def test_broken_checkpoint_is_a_setup_error_that_names_the_file(name: str, damage: str, tmp_path: Path) -> None:
    """Not a traceback: the path, and what to do."""
    trainer = new_trainer()
    checkpoint.write(tmp_path / "4", trainer, BASE, STREAM)
    path = tmp_path / "4" / name
    if damage == "missing":
        path.unlink()
    else:
        whole = path.read_bytes()
        path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "garbage": b"\xff\xfe" * 40}[damage])
    with pytest.raises(SetupError) as caught:
        checkpoint.read_trainer(tmp_path / "4", trainer)
    assert str(path) in str(caught.value)
    assert "backup" in str(caught.value)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_stream_of_a_broken_checkpoint_is_a_setup_error(damage: str, tmp_path: Path) -> None:
    """The stream's part is read on its own; it fails in the same way."""
    checkpoint.write(tmp_path / "4", new_trainer(), BASE, STREAM)
    path = tmp_path / "4" / checkpoint.STATE
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(SetupError, match="backup") as caught:
        checkpoint.read_stream(tmp_path / "4")
    assert str(tmp_path / "4") in str(caught.value)


@pytest.mark.parametrize(
    "other",
    [
        {"target_modules": "q_proj"},
        {"critic_modules": ("up_proj",)},
        {"critic": "full"},
        {"rank": 4},
        {"critic_rank": 4},
    ],
    ids=str,
)
def test_checkpoint_of_other_settings_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    """A learner started with other shapes says so, and trains nothing on half of a checkpoint."""
    checkpoint.write(tmp_path / "4", new_trainer(), BASE, STREAM)
    with pytest.raises(SetupError, match="does not fit"):
        checkpoint.read_trainer(tmp_path / "4", new_trainer(**other))


def test_adapter_files_are_what_peft_reads(tmp_path: Path) -> None:
    """The configuration is peft's with the base's name; the tensors have peft's names and the policy's bits."""
    trainer = new_trainer(rank=4, lora_alpha=12)
    _train(trainer, 0, 1)
    checkpoint.write(tmp_path / "1", trainer, BASE, STREAM)
    config = LoraConfig.from_pretrained(str(tmp_path / "1"))
    assert isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (4, 12, BASE)
    assert config.lora_dropout == 0.0
    tensors = load_file(tmp_path / "1" / "adapter_model.safetensors")
    live = {name.replace(".policy.", "."): p.detach() for name, p in trainer.policy.parameters().items()}
    assert tensors.keys() == live.keys()
    assert all(torch.equal(tensors[name], live[name]) for name in live)
    assert any(torch.count_nonzero(tensors[name]) for name in tensors if ".lora_B." in name)


def test_the_probe_is_what_peft_gives(tmp_path: Path) -> None:
    """The published adapter on a fresh base has the probe's logprobs, and the base alone has its base's."""
    trainer = new_trainer()
    _train(trainer, 0, 1)
    checkpoint.write(tmp_path / "1", trainer, BASE, STREAM)
    probe = Probe.read(tmp_path / "1")
    base = load_base(str(TINY_MODEL))

    def scored(model: Any) -> list[float]:
        with torch.no_grad():
            tables = [
                model(input_ids=torch.tensor([c.prompt_ids])).logits[0, -1].log_softmax(-1) for c in probe.contexts
            ]
        return [float(table[t]) for table, c in zip(tables, probe.contexts, strict=True) for t in c.token_ids]

    assert scored(base) == pytest.approx(probe.base_logprobs, abs=1e-4)
    assert scored(PeftModel.from_pretrained(base, str(tmp_path / "1"))) == pytest.approx(probe.logprobs, abs=1e-4)
    assert probe.logprobs != pytest.approx(probe.base_logprobs, abs=1e-3)
    assert len(probe.logprobs) > 20


@FORMS
def test_value_head_is_in_the_checkpoint(form: str, tmp_path: Path) -> None:
    """peft's own save set would drop it."""
    trainer = new_trainer(critic=form)
    _train(trainer, 0, 1)
    checkpoint.write(tmp_path / "1", trainer, BASE, STREAM)
    head = load_file(tmp_path / "1" / "critic.safetensors")["head.weight"]
    assert torch.equal(head, trainer.critic.head.weight)
    assert torch.count_nonzero(head)


def test_adapter_with_an_unknown_key_is_refused_with_the_key(tmp_path: Path) -> None:
    """A tensor that the model has no place for is named."""
    trainer = new_trainer()
    checkpoint.write(tmp_path / "1", trainer, BASE, STREAM)
    path = tmp_path / "1" / checkpoint.ADAPTER
    save_file({**load_file(path), "zzz.lora_A.weight": torch.zeros(1)}, path)
    with pytest.raises(SetupError, match=r"zzz\.lora_A\.weight"):
        checkpoint.read_trainer(tmp_path / "1", trainer)


def test_stream_comes_back_as_it_was(tmp_path: Path) -> None:
    """Positions and counters are kept as they are."""
    checkpoint.write(tmp_path / "1", new_trainer(), BASE, STREAM)
    assert checkpoint.read_stream(tmp_path / "1") == STREAM


def test_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    """NaN is not JSON; a checkpoint with one would be unreadable elsewhere, so nothing is written."""
    with pytest.raises(ValueError):
        checkpoint.write(tmp_path / "1", new_trainer(), BASE, {"mean": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_joins_go_on_from_a_checkpoint_in_the_same_order(tmp_path: Path) -> None:
    """Turns of a waiting session stay in time order, and sessions expire in order, whatever their ids are called."""
    trainer = new_trainer()

    def waiting() -> Joins:
        joins = Joins(timedelta(seconds=100))
        for offset, (session, turn_id) in enumerate([("z", "c9"), ("y", "c1"), ("z", "c5"), ("a", "c3"), ("z", "c1")]):
            joins.apply(completion(session, turn_id, seconds=offset), Position(0, offset))
        return joins

    checkpoint.write(tmp_path / "1", trainer, BASE, {"joins": waiting().state()})
    resumed = Joins(timedelta(seconds=100))
    resumed.load_state(checkpoint.read_stream(tmp_path / "1")["joins"])
    wanted = Joined("z", (Position(0, 0), Position(0, 2), Position(0, 4)), (Position(0, 5),))
    final = feedback("z", "f", seconds=5)
    assert waiting().apply(final, Position(0, 5)) == wanted
    assert resumed.apply(final, Position(0, 5)) == wanted
    assert list(resumed.expire(moment(500))) == ["y", "a"]
