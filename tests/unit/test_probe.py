"""The probe: an engine that applies an adapter passes, one that misapplies it does not, whatever its dtype."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engines.base import Adapter
from app.engines.probe import BASE_LIMIT, TOLERANCE, require_reproduced
from app.errors import AdapterRejected
from app.probe import FILE, Context, Probe

ADAPTER = Adapter("riacho", 1, Path("/store/1"))
COUNT = 24


def probe_of(effect: float, seed: int = 0) -> Probe:
    """A probe whose adapter moves logprobs by about `effect` nats."""
    rng = random.Random(seed)
    base = [-rng.uniform(0.5, 8) for _ in range(COUNT)]
    moved = [value + rng.gauss(0, effect) for value in base]
    return Probe([Context([1], list(range(COUNT)), moved, base)])


def noisy(values: Any, noise: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [value + rng.gauss(0, noise) for value in values]


def verdict(probe: Probe, adapted: Any, base: Any) -> str:
    try:
        require_reproduced(ADAPTER, probe, adapted, base)
    except AdapterRejected as error:
        return error.message
    return ""


@given(st.integers(0, 2**32), st.sampled_from([1e-6, 1e-5, 0.02, 0.05]), st.floats(0, 3))
def test_an_engine_that_applies_the_adapter_passes(seed: int, noise: float, effect: float) -> None:
    """With the noise of float32 or bfloat16, however small or large the adapter's effect is."""
    probe = probe_of(effect, seed)
    base = noisy(probe.base_logprobs, noise, seed + 1)
    largest = max(abs(b - p) for b, p in zip(base, probe.base_logprobs, strict=True))
    adapted = [value + largest * random.Random(seed + 2).uniform(-1, 1) for value in probe.logprobs]
    assert verdict(probe, adapted, base) == ""


@pytest.mark.parametrize(("noise", "effect"), [(1e-6, 1e-4), (1e-6, 0.01), (1e-6, 1.0), (0.02, 0.3), (0.02, 2.0)])
@pytest.mark.parametrize("seed", range(20))
def test_an_ignored_adapter_is_found(noise: float, effect: float, seed: int) -> None:
    """The engine gives the base's logprobs for the adapter, with its noise."""
    probe = probe_of(effect, seed)
    base = noisy(probe.base_logprobs, noise, seed + 1)
    assert verdict(probe, noisy(probe.base_logprobs, noise, seed + 2), base)


@pytest.mark.parametrize("share", [0.4, 1.6, -1.0])
def test_a_part_of_an_adapter_is_not_enough(share: float) -> None:
    """An effect below the absolute tolerance still has to be there in whole."""
    probe = probe_of(TOLERANCE / 10)
    pairs = zip(probe.logprobs, probe.base_logprobs, strict=True)
    adapted = [base + share * (value - base) for value, base in pairs]
    assert f"{share:.0%}" in verdict(probe, adapted, probe.base_logprobs)


def test_another_base_is_named() -> None:
    """Beyond any dtype's noise on the base itself, the base is at fault."""
    probe = probe_of(1.0)
    base = [probe.base_logprobs[0] + BASE_LIMIT * 1.01, *probe.base_logprobs[1:]]
    assert "another base" in verdict(probe, probe.logprobs, base)


@pytest.mark.parametrize("which", ["adapted", "base"])
def test_nan_never_passes(which: str) -> None:
    """An engine whose numbers are not finite reproduces nothing."""
    probe = probe_of(1.0)
    broken = [float("nan"), *probe.logprobs[1:]]
    scores = {"adapted": probe.logprobs, "base": probe.base_logprobs} | {which: broken}
    assert verdict(probe, scores["adapted"], scores["base"])


def test_a_probe_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every float survives exactly."""
    probe = probe_of(1.0)
    (tmp_path / FILE).write_bytes(probe.encode())
    assert Probe.read(tmp_path) == probe


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(logprobs=fields["logprobs"][1:]),
        lambda fields: fields.update(prompt_ids=[]),
        lambda fields: fields["token_ids"].__setitem__(0, True),
        lambda fields: fields["base_logprobs"].__setitem__(0, None),
        lambda fields: fields.pop("prompt_ids"),
        lambda fields: fields.update(other=1),
    ],
)
def test_a_broken_probe_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Missing or uneven parts, ids that are none, logprobs that are no numbers."""
    fields = json.loads(probe_of(1.0).encode())
    change(fields["contexts"][0])
    (tmp_path / FILE).write_text(json.dumps(fields))
    with pytest.raises(AdapterRejected, match="publish it again"):
        Probe.read(tmp_path)


def test_a_probe_without_tokens_is_refused(tmp_path: Path) -> None:
    """There would be nothing to compare."""
    (tmp_path / FILE).write_bytes(Probe([Context([1], [], [], [])]).encode())
    with pytest.raises(AdapterRejected, match="no tokens"):
        Probe.read(tmp_path)


def test_a_token_that_the_engine_does_not_list_fails() -> None:
    """A token that is likely to the learner is missing among the engine's likeliest."""
    probe = probe_of(0.1)
    adapted = probe.chosen([dict(list(zip(range(COUNT), probe.logprobs, strict=True))[1:])])
    assert "misapplies" in verdict(probe, adapted, probe.base_logprobs)
