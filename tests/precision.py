"""How far an engine's logprobs may be from those of transformers in float32, by the engine's dtype."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on |recorded - recomputed|, in nats, over the tokens of some answers.

    Attributes:
        largest: of any one token.
        mean: over all of them.
    """

    largest: float
    mean: float

    def require(self, differences: Sequence[float]) -> None:
        """Fails, with the numbers, unless these tokens are the same model's."""
        largest, mean = max(differences), sum(differences) / len(differences)
        assert largest <= self.largest, f"{largest:.3g} nats at one token (limit {self.largest:g})"
        assert mean <= self.mean, f"{mean:.3g} nats on average (limit {self.mean:g})"


def require_another(differences: Sequence[float]) -> None:
    """Fails unless these tokens are clearly another model's in any dtype, so that agreement means something."""
    mean = sum(differences) / len(differences)
    assert mean > ANOTHER, f"only {mean:.3g} nats on average (another model: {ANOTHER:g})"


ANOTHER = 0.1
TOLERANCES = {"float32": Tolerance(largest=1e-4, mean=2e-5), "bfloat16": Tolerance(largest=0.25, mean=0.03)}
