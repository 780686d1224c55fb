"""A vote service that runs: its socket and its server, in a thread of this process."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

from gerl.errors import GerlError
from gerl.vote.ballots import Ballots
from gerl.vote.tokens import Tokens

logger = logging.getLogger("gerl")
CLOSING = 2.0  # seconds for requests under way when the service ends
TOLD = 0.3  # seconds in which pages hear that the run is over
STARTING = 10.0


def address(listener: socket.socket, host: str | None = None) -> str:
    """The URL of a socket, under another name of this machine if one is given."""
    bound, port = listener.getsockname()[:2]
    name = host or bound
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


@contextlib.contextmanager
def serving(listener: socket.socket, ballots: Ballots, tokens: Tokens) -> Iterator[threading.Thread]:
    """The service at `listener` as long as the context lasts; pages are told of `ballots.ended` before it ends."""
    import uvicorn

    from gerl.commandline.connections import Connection
    from gerl.vote.app import build_app

    config = uvicorn.Config(
        build_app(ballots, tokens),
        http=Connection,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(CLOSING),
        server_header=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="vote service", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + STARTING
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise GerlError("the vote service failed to start: see its log")
            time.sleep(0.01)
        yield thread
    finally:
        if ballots.ended:
            time.sleep(TOLD)
        # open event streams never end by themselves, and uvicorn would log an error for each
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
        thread.join(CLOSING + 5)
        listener.close()
        ballots.write_preferences()
        ballots.journal.close()
