"""`python -m gerl.vote [experiment=NAME] [key=value ...]`: people vote on a run's images while it trains."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from gerl.commandline import signals
from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.commandline.composition import CHOICES, asked_for, compose_changes, compose_run, hydra_options
from gerl.errors import ConfigError, Interrupted, TrainingError
from gerl.run.session import VOTES
from gerl.trainer.run_folder import folder_to_resume, read_configuration
from gerl.utils.serving import is_loopback, listen, require
from reward_models.votes import reaper

logger = logging.getLogger("gerl")
NAME = re.compile(r"[\w.@+-]{1,64}")
EXAMPLE = "reward.scorers={vote: {kwargs: {url: 'http://127.0.0.1:1'}}}"  # with which a run is checked
ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address -> the address for connections from the same machine


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command-line options."""

    voters: str | None = key("names of the voters, such as voters=anna,ben; each gets a personal link")
    votes: int = key(
        "votes by different people on a group before it counts, with their mean", 1, unit="a number, at least 1", low=1
    )
    host: str = key("address to listen on; unless it is the loopback interface, links have tokens", "127.0.0.1")
    port: int = key("port to listen on; 0 selects a free one", 8100, unit="a port, 0 to 65535")
    undo: int = key("seconds after the last vote of a step in which it can be undone", 3, unit="seconds")
    lease: int = key(
        "seconds of inactivity of a voter after which others get the group", 120, unit="seconds, at least 1", low=1
    )
    serve_only: bool = key("true: serve for a run elsewhere, with the scorer vote", False)
    folder: Path | None = key("folder for the votes, with serve_only=true; otherwise they are in the run folder")


PARSER = Parser(
    "voting",
    "python -m gerl.vote",
    "[experiment=NAME] [key=value ...]",
    "Train on human preferences: a page shows the images of each prompt, and the LoRA learns from the votes.",
    Options,
    rest=True,
    notes="All other keys are those of training (gerl train --help). The scorer vote replaces the experiment's; "
    "reward.scorers.ocr.weight=0 adds one that only watches. checkpoint.resume=auto resumes.",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(argv, lambda: PARSER.help(program), run)


def run(arguments: Sequence[str]) -> None:
    """Check the command line, then serve; train as well, unless `serve_only`."""
    hydra = hydra_options(arguments)
    if hydra.multirun or hydra.shown:
        raise ConfigError(
            f"{'-m' if hydra.multirun else '--cfg'}: people vote on one run at a time; use it with gerl train"
        )
    options, overrides = PARSER.parse(hydra.arguments)
    for name in (override.partition("=")[0] for override in overrides):
        near = get_close_matches(name, [field.name for field in fields(Options)], n=1)
        if near and name not in CHOICES:
            raise ConfigError(f"{name}: there is no such key, did you mean {near[0]!r}; --help lists those of voting")
    names = voters(options.voters)
    if options.port > 65535:
        raise ConfigError(f"port={options.port}: it must be a port, 0 to 65535")
    if options.serve_only:
        serve(options, names, overrides)
        return
    if options.folder is not None:
        raise ConfigError("folder is for serve_only=true: the votes of a run are in its folder")
    vote(options, names, overrides)


def voters(text: str | None) -> list[str]:
    """Parse names from `a,b` or `[a,b]`; raises `ConfigError` for names that are invalid in a link or repeated."""
    names = [name.strip() for name in (text or "").strip("[]").split(",")] if text else []
    for name in names:
        if not NAME.fullmatch(name) or not name.isascii():
            raise ConfigError(
                f"voters={text}: {name!r} is not a valid name for a link; use ASCII letters, digits and . @ + - _"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"voters={text}: a name is given twice; give each voter a different one")
    return names


def serve(options: Options, names: Sequence[str], rest: Sequence[str]) -> None:
    """Serve until a signal arrives."""
    if rest:
        raise ConfigError(f"{rest[0]}: with serve_only=true nothing is trained; give this key to the run")
    if options.folder is None:
        raise ConfigError(
            "folder is missing: give folder=FOLDER for the votes, or the votes/ of a run to serve it again"
        )
    require("vote", "fastapi", "uvicorn")
    from gerl.web.server import address
    from reward_models.votes.ballots import Ballots, Rules
    from reward_models.votes.service import Tokens, voting

    tokens = Tokens.of(options.folder, options.host, names)
    ballots = Ballots(options.folder, Rules(options.votes, options.lease, options.undo))
    listener = listen(options.host, options.port)
    with voting(listener, ballots, tokens) as server:
        tokens.keep()
        _say(tokens.links(address(listener, _public(options.host))))
        url, token = address(listener, _public(options.host)), ""
        if tokens.run is not None:
            token = f', token_file: FILE with the token "run" of {tokens.path}'
        logger.info("the run: gerl train 'reward.scorers={vote: {kwargs: {url: %s%s}}}' ...", url, token)
        while server.is_alive():
            server.join(1.0)


def vote(options: Options, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Serve, and train on the votes."""
    run_dir, steps, arguments = prepare(overrides)
    require("vote", "fastapi", "uvicorn")
    from gerl.web.server import address
    from reward_models.votes.ballots import Ballots, Rules
    from reward_models.votes.service import Tokens, voting

    folder = run_dir / VOTES
    tokens = Tokens.of(folder, options.host, names)
    ballots = Ballots(folder, Rules(options.votes, options.lease, options.undo, steps))
    listener = listen(options.host, options.port)
    with voting(listener, ballots, tokens) as server:
        host = ALL.get(options.host)
        kwargs = f"url: '{address(listener, host)}'" + (f", token_env: {TOKEN}" if tokens.run is not None else "")
        scorer = f"reward.scorers={{vote: {{kwargs: {{{kwargs}}}}}}}"
        _say(tokens.links(address(listener, _public(options.host))))
        train([scorer, *arguments], tokens.run, ballots.end, server)
    if (file := ballots.write_preferences()) is not None:
        logger.info("preferences: %s", file)


def prepare(overrides: Sequence[str]) -> tuple[Path, int, list[str]]:
    """Return run folder, number of steps and the run's arguments, checked except for prompts and model.

    Raises `ConfigError` if an argument is not possible.
    """
    if whole := [o for o in overrides if re.match(r"\+*reward\.scorers(\.vote)?=", o)]:
        raise ConfigError(
            f"{whole[0]}: the reward comes from votes; add a scorer with reward.scorers.NAME.weight=W, 0 to only "
            "watch it"
        )
    asked = asked_for([EXAMPLE, *overrides])
    run_dir, arguments = folder_to_resume(asked), list(overrides)
    if run_dir is None:
        run_dir = asked.run_dir
        if "hydra.run.dir" not in asked.given:  # the default has a timestamp: pass it on to the run
            arguments.append(f"hydra.run.dir={run_dir}")
        config = compose_run([EXAMPLE, *overrides]).config
        if config.rollout.n < 2:
            raise ConfigError("rollout.n=1: people choose among the images of a prompt; use 2 or more, such as 4")
        return run_dir, config.trainer.steps, arguments
    settings = read_configuration(run_dir / "config.yaml")[0]
    return run_dir, compose_changes(settings, [EXAMPLE, *overrides]).trainer.steps, arguments


def _public(host: str) -> str | None:
    """Return the name under which others reach this machine if `host` is a wildcard address, else None."""
    if is_loopback(host) or host not in ALL:
        return None
    return socket.gethostname()


def _say(links: dict[str, str]) -> None:
    if len(links) == 1:
        logger.info("vote at %s", *links.values())
        return
    for name, link in links.items():
        logger.info("%s votes at %s", name, link)


# --- Training run with votes, as a child process in the same terminal

TOKEN = "GERL_VOTE_TOKEN"  # environment variable with the token for the scorer
LOOK = 0.2  # polling interval in seconds


def train(arguments: Sequence[str], token: str | None, ended: Callable[[str], None], server: threading.Thread) -> None:
    """Run `gerl train` with `arguments` to its end; `ended` receives the outcome, as a message for voters.

    A signal that ends this command first ends the run gracefully, before `Interrupted` propagates. Raises
    `TrainingError` if the run fails, or the `server` ends before it.
    """
    environment = dict(os.environ) | ({TOKEN: token} if token is not None else {})
    command = [sys.executable, "-m", "gerl.trainer.main_flowgrpo", *arguments]
    process = subprocess.Popen(command, env=environment)
    with _guarded(process), signals.before_leaving(process.kill):
        try:
            while process.poll() is None:
                if not server.is_alive():
                    process.send_signal(signal.SIGTERM)
                    process.wait()
                    raise TrainingError("the vote service stopped, and the run with it: see its log")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
        except KeyboardInterrupt as error:
            ended("The run was stopped.")
            number = error.signal_number if isinstance(error, Interrupted) else signal.SIGINT
            if process.poll() is None:
                process.send_signal(number)  # a terminal sends it to both: repeats within a second count as one
            process.wait()
            raise
    if process.returncode == 0:
        ended("The run is finished. Thank you.")
        return
    ended("The run was stopped." if process.returncode > 128 else "The run ended with an error.")
    how = f"by {signals.name(-process.returncode)}" if process.returncode < 0 else f"with {process.returncode}"
    raise TrainingError(f"the run ended {how}: see its output above; the votes are kept")


@contextlib.contextmanager
def _guarded(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Ensure that `process` ends gracefully if this process dies within the context, for example by kill -9."""
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
        watching.communicate(b"!")
