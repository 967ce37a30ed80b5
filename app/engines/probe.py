"""Does an engine apply an adapter as the learner trained it?

The engine scores the probe of a version under the adapter and under the base. How far it is from the learner on the
base is its own numerical noise (1e-5 in float32, up to .2 nats in bfloat16), so the tolerance follows from the
engine's dtype without being told it. The adapter must then be within the tolerance, and its effect, adapter minus
base, must go the way and about as far as the learner's: an adapter that is ignored in whole or in part does not.
"""

from collections.abc import Sequence
from math import sqrt

from app.engines.base import Adapter
from app.errors import AdapterRejected
from app.probe import Probe

BASE_LIMIT = 0.5  # nats: beyond any dtype's noise, so another base
TOLERANCE = 1e-3  # nats: what a float32 engine may differ by
NOISE_FACTOR = 4.0  # the adapter's path has more roundings than the base's
QUIET = 1e-5  # nats: below this no dtype tells an effect from noise
LEAST_EFFECT, MOST_EFFECT = 0.5, 1.5  # of the learner's effect


def require_reproduced(adapter: Adapter, probe: Probe, adapted: Sequence[float], base: Sequence[float]) -> None:
    """Raises AdapterRejected, with the numbers, unless the engine's logprobs are those of the probe.

    Args:
        adapted: the engine's logprobs of the probe's tokens under the adapter.
        base: the same under the base.
    """
    noise = _differences(base, probe.base_logprobs)
    if not _largest(noise) <= BASE_LIMIT:
        raise AdapterRejected(
            f"{adapter.name}: the engine's base differs from the learner's by {_largest(noise):.3g} nats on the probe "
            f"(limit {BASE_LIMIT:g}): it serves another base, or one that is quantised"
        )
    tolerance = max(TOLERANCE, NOISE_FACTOR * _largest(noise))
    error = _largest(_differences(adapted, probe.logprobs))
    if not error <= tolerance:
        raise AdapterRejected(
            f"{adapter.name}: the engine differs from the learner by {error:.3g} nats on the probe under the adapter "
            f"(limit {tolerance:.3g}; on the base {_largest(noise):.3g}): it misapplies the adapter"
        )
    wanted = _differences(probe.logprobs, probe.base_logprobs)
    if _rms(wanted) <= NOISE_FACTOR * max(_rms(noise), QUIET):
        return  # too small an effect to be told from noise
    effect = _share(_differences(adapted, base), wanted)
    if not LEAST_EFFECT <= effect <= MOST_EFFECT:
        raise AdapterRejected(
            f"{adapter.name}: the engine shows {effect:.0%} of the adapter's effect on the probe "
            f"({_rms(wanted):.3g} nats): it ignores the adapter or a part of it"
        )


def _differences(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ones, others, strict=True)]


def _largest(values: Sequence[float]) -> float:
    return max(map(abs, values))


def _rms(values: Sequence[float]) -> float:
    return sqrt(sum(value * value for value in values) / len(values))


def _share(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The multiple of `wanted` that is nearest to `found` (least squares)."""
    return sum(f * w for f, w in zip(found, wanted, strict=True)) / sum(w * w for w in wanted)
