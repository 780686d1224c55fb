"""Base class of scorers that call a service: JSON client with time-outs and retries, tokens, image encoding."""

import base64
import io
import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import responses
from pathlib import Path
from typing import Annotated, Self, TypeVar
from urllib.parse import urlsplit

import requests
from PIL import Image
from pydantic import Field
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError, ReadTimeoutError

from gerl.errors import RewardError
from gerl.rewards.scorers.base import JSON, Scorer
from gerl.utils.http import Answer, UnreadableAnswer, exchange
from gerl.utils.serving import is_loopback

# --- JSON client with time-outs and retries, tokens, image encoding

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0  # seconds between two attempts; a service that requests more is broken or out of quota
MAX_ANSWER = 16 * 10**6  # bytes; scores of a batch, or a judge's text with log-probabilities, are a hundredth of it
SHOWN = 200  # characters of an answer that a message quotes
_SCATTER = random.Random()  # a separate generator: retries must not disturb seeded ones

_NO_TOKEN = "the service requires a token, set token_file to its file or token_env to its environment variable"
_WRONG_NAME = "correct the address and the name of the model or scorer"
_OVERLOADED = "the service is overloaded, lower concurrency"
REMEDIES = {
    401: _NO_TOKEN,
    403: _NO_TOKEN,
    404: _WRONG_NAME,
    405: _WRONG_NAME,
    408: _OVERLOADED,
    413: "the images are too large for the service, lower image_size (and batch_size if there is one)",
    429: _OVERLOADED,
}
REJECTED = "the service rejects such a request, correct the kwargs"

Item = TypeVar("Item")
Result = TypeVar("Result")


class Transient(RewardError):
    """Error of a request that may succeed later; `wait` is the delay in seconds that the service requests."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True, kw_only=True)
class HttpScorer(Scorer):
    """Base class of scorers that call a service.

    `token_file` or `token_env` names the file or environment variable with the bearer token, which must not be in the
    configuration; the driver and reward workers read it. `timeout` limits an attempt, in seconds from connecting to the
    last byte of the answer; `concurrency` limits the requests in flight per reward worker. A request is repeated up to
    `retries` times after a connection error, a time-out or a status of 408, 429 or 5xx: after `backoff` seconds,
    doubled each time, or as the service requests in `Retry-After`. The environment's proxy settings apply, except to
    this machine.
    """

    token_file: str | None = None
    token_env: str | None = None
    timeout: Annotated[float, Field(gt=0)] = 120.0
    concurrency: Annotated[int, Field(ge=1)] = 8
    retries: Annotated[int, Field(ge=0)] = 5
    backoff: Annotated[float, Field(ge=0)] = 1.0

    def __post_init__(self) -> None:
        read_token(self.token_file, self.token_env)

    def client(self, url: str) -> "Client":
        """Return a client of the service at `url`; rereads the token, so that it can be renewed during a run."""
        return Client(url, self, *read_token(self.token_file, self.token_env))


def read_token(file: str | None, variable: str | None) -> tuple[str | None, str]:
    """Read the bearer token from `file` or the environment variable `variable`; return it and its key, or None and "".

    Raises:
        RewardError: both are given, or the source holds no token; the message does not show it.
    """
    if file is not None and variable is not None:
        raise RewardError(f"token_file={file} and token_env={variable} are both given: keep one of them")
    if file is not None:
        source = f"token_file={file}"
        try:
            token = Path(file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RewardError(f"{source} cannot be read ({type(error).__name__}): give a text file") from None
    elif variable is not None:
        source = f"token_env={variable}"
        if variable not in os.environ:
            raise RewardError(
                f"{source} holds no token: this variable is not set; export it for driver and reward workers, or "
                "for the service"
            )
        token = os.environ[variable]
    else:
        return None, ""
    token = token.strip()
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise RewardError(f"{source} holds no token: expected one line of printable ASCII without spaces")
    return token, source


class Client:
    """JSON client of the service at `url`, for one scoring call; leaving the context cancels requests in progress.

    `config` sets time-out, retries and concurrency; `source` names the origin of `token`. No message shows the token.

    Raises:
        RewardError: raised by every method for a failed request, with the answer and the remedy.
    """

    def __init__(self, url: str, config: HttpScorer, token: str | None = None, source: str = "") -> None:
        self.url = url.rstrip("/")
        self.config = config
        self._token = token
        self._source = source
        self._stop = threading.Event()
        self._session = requests.Session()
        self._session.trust_env = not is_loopback(urlsplit(url).hostname or "")
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=config.concurrency))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._session.close()

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Apply `function` to the items, `config.concurrency` at a time; return the results in order.

        Raises the first failure at once and drops items not yet started; leaving the context ends the retries.
        """
        pool = ThreadPoolExecutor(self.config.concurrency, thread_name_prefix="scorer-http")
        try:
            futures = [pool.submit(function, item) for item in items]
            for future in as_completed(futures):
                future.result()
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def post(self, path: str, payload: Mapping[str, object]) -> JSON:
        """POST `payload` to `url + path` and return the JSON of the answer."""
        body = json.dumps(payload, allow_nan=False).encode()
        for attempt in range(self.config.retries + 1):
            try:
                return self._once(self.url + path, body)
            except Transient as error:
                if attempt == self.config.retries:
                    raise Transient(f"{error} ({attempt + 1} attempts)") from None
                if error.wait > LONGEST_WAIT:
                    raise RewardError(f"{error} (Retry-After is {error.wait:.0f} s, which is too long)") from None
                # jitter, so that requests refused together are not repeated together
                pause = self.config.backoff * 2 ** min(attempt, 16) * _SCATTER.uniform(0.75, 1.25)
                pause = max(error.wait, min(pause, LONGEST_WAIT))
                log.warning("%s (attempt %d; next in %.1f s)", error, attempt + 1, pause)
                if self._stop.wait(pause):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _once(self, url: str, body: bytes) -> JSON:
        request = f"POST {url}"
        try:
            answer = exchange(
                *(self._session, "POST", url, MAX_ANSWER, self.config.timeout),
                data=body,
                headers={"Content-Type": "application/json", "Accept": "application/json"},
                auth=self._authorise,
            )
        except UnreadableAnswer as error:
            raise RewardError(f"{request} answered with {self.redacted(str(error))}") from None
        except (TimeoutError, requests.Timeout, ReadTimeoutError):
            raise Transient(
                f"{request} gave no answer within {self.config.timeout:g} s: raise timeout, or lower concurrency "
                "if the service is overloaded"
            ) from None
        except requests.exceptions.SSLError as error:
            message = f"{request}: no secure connection ({_cause(error)}): correct the address"
            raise RewardError(message) from None
        except (requests.ConnectionError, HTTPError) as error:
            raise Transient(
                f"{request}: the connection failed or was broken ({_cause(error)}): start the service or "
                "correct the address"
            ) from None
        except requests.RequestException as error:
            raise RewardError(f"{request} cannot be requested ({_cause(error)}): correct the address") from None
        return self._value(request, answer)

    def _value(self, request: str, answer: Answer) -> JSON:
        status, text = answer.status, self.shown(answer.text)
        if 200 <= status < 300:
            try:
                return json.loads(answer.content)
            except (ValueError, RecursionError):  # no JSON, numbers of thousands of digits, deeply nested lists
                raise RewardError(
                    f"{request} answered {status} without JSON: {text}: correct the address, or check the log of the "
                    "service"
                ) from None
        remedy = self._remedy(status, answer.headers.get("Location", ""))
        message = f"{request} answered {status} {responses.get(status, '')}: {text}: {remedy}"
        if status in (408, 429) or status >= 500:
            raise Transient(message, _retry_after(answer.headers.get("Retry-After", "")))
        raise RewardError(message)

    def _remedy(self, status: int, location: str) -> str:
        if status in (401, 403) and self._source:
            return f"the token of {self._source} is rejected, correct it"
        if 300 <= status < 400:
            return f"use the address it redirects to, {self.shown(location)}"
        return REMEDIES.get(status, "check the log of the service" if status >= 500 else REJECTED)

    def _authorise(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # set for every request, even without a token: otherwise requests would look for a password in ~/.netrc
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def shown(self, text: str) -> str:
        """Return the first `SHOWN` characters of an answer on one line, without the token, for an error message."""
        return repr(" ".join(self.redacted(text).split())[:SHOWN])

    def quoted(self, answer: JSON) -> str:
        """Return a JSON answer as `shown` does."""
        try:
            return self.shown(json.dumps(answer))
        except RecursionError:
            return "endlessly nested lists"

    def redacted(self, text: str) -> str:
        """Return `text` without the token."""
        return text if self._token is None else text.replace(self._token, "[token]")


def png_base64(image: Image.Image) -> str:
    """Encode an image as an RGB PNG in base64."""
    buffer = io.BytesIO()
    # lossless at any level; 1 is several times as fast as the default and hardly larger
    image.convert("RGB").save(buffer, "PNG", compress_level=1)
    return to_base64(buffer.getvalue())


def to_base64(content: bytes) -> str:
    """Encode bytes in base64."""
    return base64.b64encode(content).decode()


def at_most(image: Image.Image, size: int | None) -> Image.Image:
    """Downscale an image in proportion to at most `size` pixels a side; None leaves it unchanged."""
    if size is None or max(image.size) <= size:
        return image
    width, height = (max(1, round(side * size / max(image.size))) for side in image.size)
    return image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def check_url(kwarg: str, url: str) -> None:
    """Raise `RewardError` unless `url` is a plain HTTP address of a service, without credentials."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  reading it checks it
    except ValueError as error:
        raise RewardError(f"{kwarg} is not an address ({error}): use one such as http://127.0.0.1:8000") from None
    if parts.username is not None or parts.password is not None:
        raise RewardError(f"{kwarg} contains a password: remove it, and set a token in token_file or token_env")
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in url):
        raise RewardError(f"{kwarg}={url!r} is not an address: use one such as http://127.0.0.1:8000")
    if parts.query or parts.fragment:
        raise RewardError(
            f"{kwarg} has a part after its path, and paths are appended to it: remove ? or # and what follows"
        )


def _retry_after(value: str) -> float:
    """Return the seconds of a `Retry-After` header, a number or a date; 0 if it is neither (RFC 9110, 10.2.3)."""
    try:
        wait = int(value) if value.isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
        return max(0.0, float(wait))
    except OverflowError:
        return math.inf
    except ValueError:
        return 0.0


def _cause(error: BaseException) -> str:
    """Describe the root cause of an exception chain, such as a refused connection, in one line."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN]
