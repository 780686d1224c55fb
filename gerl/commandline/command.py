"""Run a command line: imports, help, log, signals, exit codes, output folder, sockets."""

import contextlib
import functools
import gc
import importlib.metadata
import inspect
import ipaddress
import logging
import os
import pkgutil
import re
import shlex
import shutil
import socket
import sys
import threading
import traceback
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from gerl.commandline import signals
from gerl.errors import ConfigError, GerlError, Interrupted, Stopped, causes

logger = logging.getLogger("gerl")
PAGE = 8765  # the default port of `gerl watch`
WITH_LEVELS = "%(levelname)s %(name)s: %(message)s"  # the log of a service


def run_command(
    argv: Sequence[str] | None,
    help_text: Callable[[], str],
    work: Callable[[list[str]], object],
    logger: logging.Logger = logger,
    log_format: str = "%(message)s",
) -> int:
    """Run `work` on the arguments (None: those of the process) and return the exit code.

    0: success; 1: an error; 2: a wrong configuration, both printed as one sentence; 128 + N: signal N. `logger`: whose
    info messages are shown. Notes of the exception (the saved checkpoint) are printed with it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format=log_format)

    def run() -> int:
        if any(a in ("-h", "--help") for a in arguments):
            sys.stdout.write(help_text())
        else:
            work(arguments)
        return 0

    return _ended(run, logger)


def start(
    module: str, log_format: str = "%(message)s", arguments: Sequence[str] | None = None, program: str | None = None
) -> int:
    """Import the `module` of a command, with signals handled, and run its `main`; `program`: the command as typed."""
    logging.basicConfig(level=logging.WARNING, format=log_format)

    def work() -> int:
        with importing():
            command = import_module(module)
        return int(command.main(arguments) if program is None else command.main(arguments, program))

    return _ended(work, logger)


def _ended(work: Callable[[], int], logger: logging.Logger) -> int:
    """Return the exit code of `work`, or of the exception that ends it; a signal decides it even after an error."""
    logger.setLevel(logging.INFO)
    with signals.handled():
        try:
            return work()
        except BaseException as error:
            # Ray and other C code turn an interruption into exceptions of their own: the signal counts
            number = signals.received()
            if number is None and isinstance(error, Stopped):
                logger.info("%s", with_notes(str(error), error))
                return error.code
            if number is None and isinstance(error, KeyboardInterrupt):
                number = error.signal_number if isinstance(error, Interrupted) else signals.SIGINT
            signals.answered()
            if number is None:
                if (code := _said(error)) is not None:
                    return code
                raise
            if isinstance(error, KeyboardInterrupt) or not signals.came_late():
                logger.info("%s", with_notes(f"stopped by {signals.name(number)}", error))
            else:
                error.add_note(f"then stopped by {signals.name(number)}")
                if _said(error) is None:
                    traceback.print_exception(error)
            return 128 + number


@contextlib.contextmanager
def logged_at(level: str) -> Iterator[None]:
    """Log gerl's messages from `level` (`logger.level`) on within the block."""
    before = logger.level
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)


def watching(run_dir: Path) -> str:
    """Return the command that opens the page of a run, with the program `gerl` if it is on the PATH."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    found = shutil.which("gerl")
    own = found is not None and Path(found).parent == Path(sys.executable).parent
    program = "gerl watch" if own else f"{python} -m gerl.watch"
    return f"{program} run={shlex.quote(str(run_dir))}"


def _said(error: BaseException) -> int | None:
    """Print the sentence of an error and return its exit code; None, without printing, for an unexpected error."""
    if isinstance(error, GerlError):
        sys.stderr.write(f"{with_notes(f'error: {error}', error)}\n")
        return 2 if isinstance(error, ConfigError) else 1
    if isinstance(error, SystemExit):  # raised by a scorer, for example: the command did not finish its work
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}, line {frames[-1].lineno}," if frames else "something"
        sys.stderr.write(f"{with_notes(f'error: {where} ended the process (SystemExit)', error)}\n")
        return 1
    return None


def with_notes(sentence: str, error: BaseException) -> str:
    """Return the sentence followed by the notes of the exception and of its causes, separated by semicolons."""
    notes = [note for cause in causes(error) for note in getattr(cause, "__notes__", [])]
    return "; ".join([sentence, *dict.fromkeys(notes)])


def make_folder(out: Path) -> None:
    """Create the output folder; raises `ConfigError` if that is not possible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: the folder cannot be created ({error.strerror}); choose another") from None


# --- Callable packages such as `gerl.score(...)`, named like their main function


class CallablePackage(types.ModuleType):
    """A package that can be called like the function of the same name (`gerl.score(...)`).

    Importing a submodule binds the package over that function, so the package itself must be callable. Python looks up
    `__call__` in the class. The function is imported on the first call: signals must be handled before large imports.
    """

    _place: str  # "module:function"

    def _function(self) -> types.FunctionType:
        found: types.FunctionType = pkgutil.resolve_name(self._place)
        return found

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return self._function()(*arguments, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())


def make_callable(package: str, place: str) -> None:
    """Make `package` (a name in `sys.modules`) callable as the function `place` ("module:function")."""
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module._place = place  # type: ignore[attr-defined]


# --- Faster imports of large libraries

Packages = Mapping[str, list[str]]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Pause Python's cyclic garbage collector during a block of imports, which makes them faster.

    It would traverse hundreds of thousands of permanent objects again and again; they are frozen after the block.
    diffusers asks on import which distribution each package is from, which is computed on first use.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    find = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: WhenRead(find)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = find
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def imported_meanwhile(module: str) -> Iterator[None]:
    """Import `module` in a thread during a block that waits for other processes; errors are left to a later import.

    A block that fails does not wait for the thread.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            import_module(module)

    thread = threading.Thread(target=run, name=f"import {module}")
    thread.start()
    yield
    thread.join()


class WhenRead(UserDict[str, list[str]]):
    """A mapping of packages to their distributions, computed by `find` on first use: it reads many files."""

    def __init__(self, find: Callable[[], Packages]) -> None:
        self._find = find

    @functools.cached_property
    def data(self) -> Packages:  # type: ignore[override]
        return self._find()


# --- Sockets of commands that serve pages or scores, and requests from other sites


def require(extra: str, *modules: str) -> None:
    """Raise `GerlError` naming the pip extra if a package that a command serves with cannot be imported."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise GerlError(
                f"gerl {extra} needs the package {module}, which cannot be imported ({error}): run pip install "
                f"'gerl[{extra}]'"
            ) from None


def listen(host: str, port: int, remedy: str = "use another port, or stop the program that uses it") -> socket.socket:
    """Open a socket at `host:port`; raises `ConfigError` with the `remedy` if that fails."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror  # those of name resolution are negative
        raise ConfigError(f"cannot listen on host={host} port={port} ({why}): {remedy}") from None


def read_token(name: str) -> str:
    """Return the token in the environment variable `name`. Raises `ConfigError`, without showing it, if it is wrong."""
    token = os.environ.get(name, "").strip()
    if not token:
        raise ConfigError(f"token_env={name}: this environment variable is not set; export it")
    if not re.fullmatch(r"[0-9A-Za-z_.~+/=-]+", token):
        raise ConfigError(f"token_env={name}: use ASCII letters, digits and _ - . ~ in the token")
    return token


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an IP address, is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_name(host: str) -> str:
    """Return the name or address in a `Host` header without the port; empty if missing or malformed."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d*)?", host, re.ASCII | re.IGNORECASE)
    return (match[1] or match[2]).lower() if match else ""


def is_foreign(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a page of another site sends this request and it is no mere read; `headers`: by lower-case name."""
    if method in ("GET", "HEAD"):
        return False
    origin = headers.get("origin")
    elsewhere = origin is not None and origin.partition("://")[2] != headers.get("host")
    return elsewhere or headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
