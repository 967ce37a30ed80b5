"""The probe: a few next-token distributions, by which an engine proves that it applies an adapter.

The learner writes one into every version; each engine must reproduce it (app/engines/probe.py) before it serves.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.errors import AdapterRejected

FILE = "probe.json"


@dataclass(frozen=True, slots=True)
class Context:
    """What the learner's model says comes after some tokens.

    Attributes:
        prompt_ids: what comes before.
        token_ids: next tokens that are likely with the adapter and without it.
        logprobs: of `token_ids` under the adapter, at temperature 1, in nats.
        base_logprobs: the same under the base.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    base_logprobs: Sequence[float]

    def __post_init__(self) -> None:
        if not self.prompt_ids or not all(map(_is_id, (*self.prompt_ids, *self.token_ids))):
            raise ValueError("prompt_ids and token_ids must be token ids")
        if not len(self.token_ids) == len(self.logprobs) == len(self.base_logprobs):
            raise ValueError("there must be two logprobs for each of token_ids")
        if not all(map(_is_number, (*self.logprobs, *self.base_logprobs))):
            raise ValueError("logprobs must be numbers")


@dataclass(frozen=True, slots=True)
class Probe:
    """All contexts of one version."""

    contexts: Sequence[Context]

    @property
    def logprobs(self) -> list[float]:
        return [value for context in self.contexts for value in context.logprobs]

    @property
    def base_logprobs(self) -> list[float]:
        return [value for context in self.contexts for value in context.base_logprobs]

    def chosen(self, distributions: Sequence[Mapping[int, float]]) -> list[float]:
        """The logprobs of the probe's tokens out of one distribution a context; -inf for a token that is not there."""
        pairs = zip(self.contexts, distributions, strict=True)
        return [found.get(token, -math.inf) for context, found in pairs for token in context.token_ids]

    def encode(self) -> bytes:
        """JSON; what is not finite is written all the same, and refused by the engine."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, directory: Path) -> "Probe":
        """The probe of an adapter directory; raises AdapterRejected where there is none that is whole."""
        try:
            fields = json.loads((directory / FILE).read_bytes())
            probe = cls([Context(**context) for context in fields["contexts"]])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise AdapterRejected(f"the probe {directory / FILE} cannot be read ({error}); publish it again") from error
        if not probe.logprobs:
            raise AdapterRejected(f"the probe {directory / FILE} has no tokens: the adapter is too far from the base")
        return probe


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
