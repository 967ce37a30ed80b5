"""Dead letters on Kafka: a topic of one partition that is folded into the list.

A burying is a record whose key is the dead letter's position and whose value is its payload; a replay or a drop adds a
record without a value. The id is the offset of the first burying, so that it is never given out twice.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from app.events.kafka_client import Cluster
from app.events.kafka_reader import Fetched, Reader
from app.events.kafka_writer import Message, Writer
from app.events.log import DeadLetter, Position, Record

PARTITION = 0
BATCH = 500
REASON_CHARACTERS = 8192
REASON, AT = "reason", "at"


class DeadLetters:
    """The dead letters of one log. Raises LogUnavailable where the brokers do not answer."""

    def __init__(self, cluster: Cluster, writer: Writer) -> None:
        self._topic = cluster.dead_topic
        self._writer = writer
        self._reader = Reader(cluster, self._topic)
        self._lock = threading.Lock()
        self._next: int | None = None
        self._letters: dict[Position, DeadLetter] = {}

    def bury(self, record: Record, reason: str, at: datetime) -> None:
        headers = [(REASON, reason[:REASON_CHARACTERS].encode()), (AT, at.isoformat().encode())]
        self._put(record.position, record.payload, headers)

    def take_out(self, letter: DeadLetter) -> None:
        self._put(letter.position, None, [])

    def all(self) -> Sequence[DeadLetter]:
        """Oldest first."""
        with self._lock:
            self._catch_up()
            return sorted(self._letters.values(), key=lambda letter: letter.id)

    def get(self, id: int) -> DeadLetter:
        """Raises KeyError for an unknown id."""
        for letter in self.all():
            if letter.id == id:
                return letter
        raise KeyError(id)

    def close(self) -> None:
        self._reader.close()

    def _put(self, position: Position, payload: bytes | None, headers: list[tuple[str, bytes]]) -> None:
        key = str(position).encode()
        self._writer.append_now(Message(self._topic, key, payload, PARTITION, headers))

    def _catch_up(self) -> None:
        if self._next is None:
            self._next = self._reader.begins()[PARTITION]
        while records := self._reader.read({PARTITION: self._next}, BATCH):
            for record in records:
                self._apply(record)
            self._next = records[-1].offset + 1

    def _apply(self, record: Fetched) -> None:
        position = Position.parse(record.key.decode())
        if record.value is None:
            self._letters.pop(position, None)
            return
        headers = dict(record.headers)
        reason = headers[REASON].decode()
        known = self._letters.get(position)
        if known is not None:
            self._letters[position] = replace(known, reason=reason, attempts=known.attempts + 1)
            return
        at = datetime.fromisoformat(headers[AT].decode())
        self._letters[position] = DeadLetter(record.offset, position, reason, 1, record.value, at)
