"""Dry runs of shell scripts: stand-ins write down what would be done, and the parsers of gerl and Ray read it."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.dashboard.modules.job.cli import job_cli_group
from ray.scripts.scripts import cli as ray_cli

from gerl.commandline.composition import Composed, compose_run

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ["python", "-m", "gerl.trainer.main_flowgrpo"]
NAMES = ("ray", "python", "srun", "scancel", "scontrol")
STAND_IN = r"""#!/bin/bash
# name, arguments and blocked signals, in a file of its own: not every file system appends for several at a time
printf -v call '%s\x1f' "$(basename "$0")" "$@"
blocked=$(awk '/^SigBlk/ {printf "%s", $2}' /proc/self/status 2> /dev/null)
printf '%s%s\x1e' "$call" "$blocked" > "$CALLS-$EPOCHREALTIME-$$"
case $(basename "$0") in
srun) # runs here what it would run elsewhere
    while [[ $1 == --* ]]; do shift; done
    exec "$@" ;;
python)
    [[ $1 == -c ]] && exec "$PYTHON" "$@"
    [[ $1 == *.py ]] && exit
    trap 'sleep 0.2; touch "$CALLS.saved"; exit 143' TERM # as gerl ends: it takes a while
    touch "$CALLS.trains"
    while [[ $TRAINING == waits ]]; do sleep 0.05; done
    exit "$TRAINING" ;;
esac
"""


@dataclass(frozen=True)
class Call:
    """A command with its arguments, and the signals that it did not see, as bits."""

    name: str
    arguments: list[str]
    blocked: int

    @property
    def options(self) -> dict[str, Any]:
        """Of a call of `ray`, as Ray's own command line reads them; it refuses those that it does not have."""
        commands, (name, *arguments) = ray_cli.commands, self.arguments
        if name == "job":
            commands, (name, *arguments) = job_cli_group.commands, arguments
        return dict(commands[name].make_context(name, list(arguments)).params)


@dataclass(frozen=True)
class DryRun:
    """Runs scripts in gerl's folder with stand-ins for `NAMES`, which write into `folder`.

    `port`: one at which something listens, as the head of a Ray cluster does.
    """

    folder: Path
    port: int

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir()
        for name in NAMES:
            (self.folder / "bin" / name).write_text(STAND_IN)
            (self.folder / "bin" / name).chmod(0o755)

    def start(self, *command: str, training: str = "0", **environment: str) -> "subprocess.Popen[str]":
        """Start a script; `training`: the exit code of the training, or `waits` for one that a signal has to end."""
        own = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "CALLS": str(self.folder / "calls"), "WAIT": "20"}
        own |= {"PYTHON": sys.executable, "TRAINING": training, "RAY_PORT": str(self.port), "HOME": str(self.folder)}
        return subprocess.Popen(
            ["bash", *command],
            cwd=ROOT,
            env=own | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, **environment: str) -> None:
        """Run a script, which must not fail."""
        process = self.start(*command, **environment)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said

    def calls(self, name: str) -> list[Call]:
        """The calls of a command so far, in order."""
        whole = (text[:-1] for path in sorted(self._files()) if (text := path.read_text()).endswith("\x1e"))
        rows = [text.split("\x1f") for text in whole]
        return [Call(row[0], row[1:-1], int(row[-1] or "0", 16)) for row in rows if row[0] == name]

    def nothing(self) -> bool:
        """Whether no command was called."""
        return not any(self._files())

    def _files(self) -> Iterator[Path]:
        return self.folder.glob("calls-*")

    @property
    def trains(self) -> bool:
        """Whether the training has begun and can be stopped."""
        return (self.folder / "calls.trains").exists()

    @property
    def saved(self) -> bool:
        """Whether the training was stopped in order."""
        return (self.folder / "calls.saved").exists()

    def trained(self) -> Composed:
        """The training that was started, as gerl reads its keys."""
        [call] = [call for call in self.calls("python") if call.arguments[:2] == TRAIN[1:]]
        return compose_run(call.arguments[2:])


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait until `condition` holds, which it must before `process` ends."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until and process.poll() is None, process.communicate(timeout=10)[0]
        time.sleep(0.02)
