"""A small JSON server on the standard library: routes are functions from one object to another.

It is careful with what it is sent: a token when there is one, a limit on sizes and on waiting, and for every refusal
a status and a sentence ({"error": ...}).
"""

import hmac
import json
import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from megarlhf.errors import ConfigError

IDLE_S = 60
"""Seconds that a connection may stay silent in the middle of a request."""

Route = Callable[[dict[str, Any]], dict[str, Any]]

_log = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that is not answered: the text goes back to the sender with the HTTP status."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class JsonServer:
    """Answers `routes`, keyed by (method, path), while its `with` block runs. Each request has a thread of its own."""

    def __init__(
        self, host: str, port: int, routes: Mapping[tuple[str, str], Route], *, token: str, max_request_bytes: int
    ):
        """Binds (port 0: a free one). An empty `token` asks for none. Raises ConfigError when the address is taken."""
        handler = type("Handler", (_Handler,), {"routes": routes, "token": token, "max_bytes": max_request_bytes})
        try:
            self._server = _Server((host, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}; choose another") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    @property
    def url(self) -> str:
        """http://HOST:PORT."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that stays connected does not keep the process alive

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("%s: connection lost", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    routes: Mapping[tuple[str, str], Route]
    token: str
    max_bytes: int
    timeout = IDLE_S
    server_version = "megarlhf"
    sys_version = ""

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def log_message(self, format: str, *values: Any) -> None:
        _log.debug("%s %s", self.address_string(), format % values)

    def _handle(self, method: str) -> None:
        try:
            self._send(200, self._answer(method))
        except Refusal as refusal:
            self._send(refusal.status, {"error": str(refusal)})
        except TimeoutError:
            self._send(408, {"error": f"the request did not arrive within {IDLE_S} s"})
        except ConnectionError:
            raise
        except Exception as error:
            _log.exception("%s %s failed", method, self.path)
            self._send(500, {"error": f"the server failed: {type(error).__name__}: {error}"})

    def _answer(self, method: str) -> dict[str, Any]:
        if self.token and not self._is_authorised():
            raise Refusal(401, "send the server's token as `Authorization: Bearer TOKEN`")
        path = self.path.partition("?")[0]
        methods = [known for known, where in self.routes if where == path]
        if not methods:
            known = ", ".join(sorted(f"{method} {where}" for method, where in self.routes))
            raise Refusal(404, f"{path}: nothing is here; this server answers {known}")
        if method not in methods:
            raise Refusal(405, f"{path} is asked by {methods[0]}")
        return self.routes[method, path](self._body() if method == "POST" else {})

    def _is_authorised(self) -> bool:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise Refusal(411, "send a body with its Content-Length")
        if len(length) > 18 or int(length) > self.max_bytes:
            raise Refusal(413, f"{length} bytes are more than the {self.max_bytes} that this server takes at once")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise Refusal(400, f"the body ended after {len(body)} of {length} bytes")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise Refusal(400, f"the body is a {type(value).__name__}; send an object")
        return value

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)
