"""Asking a server over HTTP: JSON objects posted with a time limit, tried again when trying again can help.

Any server may give scores: `POST URL` with {"prompts", "responses", "metadata", ...}, one entry a response each, is
answered by {"scores": [number, ...]}. What `megarlhf serve` answers is one of these.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarlhf.errors import ConfigError, RemoteError

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MAX_ANSWER_BYTES = 256 * 2**20
LARGEST = (2 - 2**-23) * 2.0**127
"""In float32, in which answers are kept; JSON spells larger numbers too, and whole ones beyond all floats."""
_WORTH_RETRYING = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and with how much patience."""

    url: str
    timeout_s: float
    """Seconds that one request may take."""
    retries: int = 0
    """Further tries when the server cannot be reached, is overloaded or fails; the pause between doubles each time."""
    token: str = ""
    """Sent as `Authorization: Bearer ...`; empty: none."""

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The object that the server answers. Raises RemoteError with the server's own words, where it has any."""
        try:
            text = json.dumps(body, allow_nan=False, default=str)
        except (ValueError, RecursionError) as error:  # NaN in metadata, which no other end need understand
            raise RemoteError(f"{self.url}: the request cannot be written as JSON: {error}") from error
        return self._ask(text.encode())

    def get(self) -> dict[str, Any]:
        """The object at the address. Raises RemoteError."""
        return self._ask(None)

    def _ask(self, body: bytes | None) -> dict[str, Any]:
        for attempt in range(self.retries + 1):
            try:
                return self._once(body)
            except _WorthRetrying as problem:
                if attempt == self.retries:
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    raise RemoteError(f"{self.url}: {problem}{tries}") from problem
            time.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt))
        raise AssertionError("the last attempt returns or raises")

    def _once(self, body: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(self.url, data=body, headers=headers)
        try:
            with _OPENER.open(request, timeout=min(self.timeout_s, threading.TIMEOUT_MAX)) as response:
                answer = response.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            text = f"HTTP {error.code} {error.reason}: {_words_of(error)}"
            if error.code in _WORTH_RETRYING:
                raise _WorthRetrying(text) from error
            raise RemoteError(f"{self.url}: {text}") from error
        except TimeoutError as error:
            raise _WorthRetrying(f"no answer within {self.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise _WorthRetrying(f"cannot be reached: {reason}") from error
        except ValueError as error:  # an address that urllib or the resolver cannot spell
            raise RemoteError(f"{self.url}: cannot be asked: {error}") from error
        return self._object(answer)

    def _object(self, answer: bytes) -> dict[str, Any]:
        if len(answer) > MAX_ANSWER_BYTES:
            raise RemoteError(f"{self.url}: answered with more than {MAX_ANSWER_BYTES} bytes")
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"{self.url}: answered with something that is not JSON: {answer[:80]!r}") from error
        if not isinstance(value, dict):
            raise RemoteError(f"{self.url}: answered with a {type(value).__name__} instead of an object")
        return value


class _WorthRetrying(Exception):
    """The same request may succeed later."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token must not follow a redirect to another host, and a redirected POST would lose its body."""

    def redirect_request(self, *_):
        return None


# Servers of a run are addressed directly: what a proxy of the environment is for lies elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def is_url(spec: str) -> bool:
    """Whether a reward function's spec is the address of a server."""
    return spec.startswith(("http://", "https://"))


def check_url(setting: str, url: str) -> str:
    """`url`, which has a host and, if any, a valid port. Raises ConfigError naming `setting`."""
    try:
        parts = urlsplit(url)
        valid = is_url(url) and bool(parts.hostname) and parts.port != 0 and url.isascii() and len(url.split()) == 1
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"{setting}: {url!r} is not an address; write one like http://127.0.0.1:8000/score")
    return url


def read_token(setting: str, path: str) -> str:
    """The bearer token in a file, without the space around it; "" for no file. Raises ConfigError."""
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {Path(path).absolute()} cannot be read as a token: {error}") from error
    if not token or len(token.split()) != 1:
        raise ConfigError(f"{setting}: {Path(path).absolute()} must hold one token, without spaces in it")
    return token


def numbers(answer: dict[str, Any], key: str, count: int, url: str) -> list[Any]:
    """The list under `key`, which must hold `count` entries. Raises RemoteError saying what was there."""
    if key not in answer:
        raise RemoteError(f"{url}: the answer has no {key!r}; its keys are {sorted(answer)}")
    values = answer[key]
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} values" if isinstance(values, list) else f"a {type(values).__name__}"
        raise RemoteError(f"{url}: {key!r} holds {found}; {count} were asked for")
    return values


def is_finite_number(value: Any) -> bool:
    """Whether a JSON value is a number that can be reckoned with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _words_of(error: urllib.error.HTTPError) -> str:
    """The `error` of a JSON answer, else the start of the text."""
    text = error.read(2000).decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except ValueError:
        return text[:200]
    return str(value["error"]) if isinstance(value, dict) and "error" in value else text[:200]
