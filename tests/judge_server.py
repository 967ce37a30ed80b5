"""A small HTTP server that stands for a judge's endpoint and can go wrong in every way that matters."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Respond = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Lets the server's `respond` answer each POST."""

    server: "JudgeServer"
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers["Authorization"])
        self.server.respond(self, body)

    def send(self, status: int, body: str, **headers: str) -> None:
        """One whole answer."""
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class JudgeServer(ThreadingHTTPServer):
    """Keeps what it was asked; `released` ends what hangs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.respond: Respond = says('{"reason": "fine", "score": 5}')

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is what some tests are about."""


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def completion(content: object) -> str:
    """A chat completion with that content, as JSON."""
    return json.dumps({"id": "x", "object": "chat.completion", "choices": [{"message": {"content": content}}]})


def says(content: object) -> Respond:
    """Answers with a chat completion of that content."""
    return lambda handler, _: handler.send(200, completion(content))


def raw(status: int, body: str, **headers: str) -> Respond:
    """Answers with that status and body."""
    return lambda handler, _: handler.send(status, body, **headers)


def in_turn(*responds: Respond) -> Respond:
    """One after the other, the last one for ever."""
    left = list(responds)
    return lambda handler, body: (left.pop(0) if len(left) > 1 else left[0])(handler, body)


def hangs(handler: Handler, body: dict[str, Any]) -> None:
    """Answers nothing until it is released."""
    handler.server.released.wait()


def drips(handler: Handler, body: dict[str, Any]) -> None:
    """Sends a byte now and then, so that no read of the client's ever times out."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.server.released.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def cuts(handler: Handler, body: dict[str, Any]) -> None:
    """Promises more than it sends and cuts the connection."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def late(content: str, then: str) -> Respond:
    """Answers with `content` once it is released; what is asked after that is answered with `then` at once."""

    def respond(handler: Handler, body: dict[str, Any]) -> None:
        early = not handler.server.released.is_set()
        handler.server.released.wait()
        handler.send(200, completion(content if early else then))

    return respond
