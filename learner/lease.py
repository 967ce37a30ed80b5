"""Holding the learner's lease while updates run."""

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from app.registry import Registry
from app.registry.errors import LeaseLost, RegistryUnavailable
from app.registry.records import Lease


class LeaseKeeper:
    """Takes a lease, waiting for it if another process holds it, and renews it from a thread until it is left.

    An update may take longer than the lease lives, so the thread that trains cannot renew it. A process that
    was paused too long finds `lost` set, and the registry refuses its writes anyway. While the registry is away
    the lease is neither renewed nor lost.
    """

    def __init__(
        self, registry: Registry, name: str, holder: str, ttl_s: float, on_wait: Callable[[str], None]
    ) -> None:
        self._leases = registry.leases
        self._name, self._holder, self._ttl_s = name, holder, ttl_s
        self._on_wait = on_wait
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.lost = False
        self.lease: Lease

    def __enter__(self) -> Self:
        while (lease := self._leases.acquire(self._name, self._holder, self._ttl_s)) is None:
            holder = self._leases.holder(self._name)
            self._on_wait(holder.holder if holder else "nobody")
            self._left.wait(self._ttl_s / 5)
        self.lease = lease
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        with suppress(RegistryUnavailable):  # then it runs out by itself
            self._leases.release(self.lease)

    def _renew(self) -> None:
        while not self._left.wait(self._ttl_s / 3):
            try:
                self._leases.renew(self.lease, self._ttl_s)
            except RegistryUnavailable:
                continue
            except LeaseLost:
                self.lost = True
                return
