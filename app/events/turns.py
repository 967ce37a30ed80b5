"""Partitions take turns, so that none waits behind a busy one."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def take_turns(queues: Sequence[Iterable[T]], first: int) -> Iterator[T]:
    """One item of each queue in turn, beginning with queue `first` (modulo their number), until all are empty."""
    begin = first % len(queues)
    waiting = [iter(queue) for queue in (*queues[begin:], *queues[:begin])]
    while waiting:
        still = []
        for queue in waiting:
            for item in islice(queue, 1):
                yield item
                still.append(queue)
        waiting = still
