"""Answers of the local engine that begin as a test wants: the first tokens are given, and the rest is sampled.

The engine records given tokens like any others, each with the logprob that the model gives it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.engines import local
from app.engines.sampler import Draw


@contextmanager
def forced(beginnings: Iterator[Sequence[int]]) -> Iterator[None]:
    """While the block lasts, each new answer takes the next of `beginnings`; without one left it is sampled freely."""
    rest: dict[int, list[int]] = {}
    draw = local.draw

    def begin(logprobs: Tensor, generator: torch.Generator, **options: Any) -> Draw:
        drawn = draw(logprobs, generator, **options)
        answer = generator.initial_seed()  # one generator an answer, each with a seed of its own
        if answer not in rest:
            rest[answer] = list(next(beginnings, ()))
        if not rest[answer]:
            return drawn
        token = rest[answer].pop(0)
        return replace(drawn, token=token, logprob=float(logprobs[token]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "draw", begin)
        yield
