"""The newest verdicts of a judge."""

from collections import OrderedDict
from threading import Lock


class Cache:
    """Scores by key, the least recently used one given up first; may be used from several threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        self._lock = Lock()

    def get(self, key: bytes) -> float | None:
        with self._lock:
            if key in self._scores:
                self._scores.move_to_end(key)
            return self._scores.get(key)

    def put(self, key: bytes, score: float) -> None:
        with self._lock:
            self._scores[key] = score
            self._scores.move_to_end(key)
            while len(self._scores) > self._size:
                self._scores.popitem(last=False)
