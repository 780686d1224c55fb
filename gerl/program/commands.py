"""The program `gerl COMMAND [key=value ...]`; overview and unknown names are answered before other imports."""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from gerl.commandline import signals
from gerl.commandline.command import WITH_LEVELS, run_command, start
from gerl.errors import ConfigError

WIDTH = 110  # characters of a line of the overview


@dataclass(frozen=True)
class Command:
    """A command: the module of its `main` and a one-sentence summary."""

    module: str
    sentence: str
    log_format: str = "%(message)s"


COMMANDS = {
    "train": Command(
        "gerl.trainer.main_flowgrpo",
        "Fine-tune a diffusers pipeline with reinforcement learning; without arguments the signs demo.",
    ),
    "preflight": Command(
        "gerl.preflight.arguments", "Report whether, and how fast, a configuration can train, here or on other GPUs."
    ),
    "tune": Command(
        "gerl.trainer.tune", "Try presets and learning rates with growing budgets, and train the best one."
    ),
    "score": Command("gerl.score.command", "Score existing images with a reward, before training on it."),
    "evaluate": Command("gerl.evaluate.command", "Compare the base model with LoRAs on the same noise."),
    "export": Command(
        "gerl.export.command", "Write the LoRA of a run in the file format of another program, or merge it."
    ),
    "vote": Command(
        "reward_models.votes.command", "Train on human preferences: a page asks for votes while the run trains."
    ),
    "replay": Command(
        "gerl.trainer.replay", "Train on a dumped step of a run again, and compare it with the run, bit for bit."
    ),
    "verify": Command(
        "gerl.verify.command", "Check what a run claims, from its digests to its gradients, on any machine."
    ),
    "report": Command("gerl.run.report", "Write report.html of a run that is finished, stopped, or still training."),
    "watch": Command(
        "gerl.web.watch", "Watch a run in a browser while it trains, and ask it to save, validate or stop."
    ),
    "studio": Command("gerl.web.studio.command", "Start, watch, compare and export runs in a browser."),
    "serve": Command("reward_models.serve", "Serve a scorer over HTTP, for the scorer remote of a run.", WITH_LEVELS),
    "recipes": Command("gerl.program.recipes", "List the experiments that ship with gerl, or show the file of one."),
    "version": Command("gerl.program.version", "Print the versions and the hardware, as needed for a bug report."),
}
VERSION = ("-V", "--version")


def program() -> None:
    """Run the command line of the process and exit (entry point)."""
    signals.exit_with(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code, see `run_command`."""
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "help" and arguments:  # gerl help train
        name, arguments = arguments[0], ["--help"]
    if name in VERSION:
        name = "version"
    if name in COMMANDS:
        command = COMMANDS[name]
        return start(command.module, command.log_format, arguments, f"gerl {name}")
    return run_command([name], overview, lambda _: _refuse(name, arguments))


def overview() -> str:
    """Return the overview: each command with its summary."""
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: gerl COMMAND [key=value ...]", "", "Reinforcement learning for diffusion models.", ""]
    for name, command in COMMANDS.items():
        text = f"  {name:<{width}}{command.sentence}"
        lines.append(textwrap.fill(text, WIDTH, subsequent_indent=" " * (width + 2)))
    lines += ["", "gerl COMMAND --help explains its keys."]
    return "\n".join(lines) + "\n"


OTHER_WORDS = {"sizing": "use gerl preflight hardware=NAME", "sweep": "use gerl train -m KEY=VALUE,VALUE"}


def _refuse(name: str, arguments: Sequence[str]) -> None:
    if "=" in name or name.startswith("-"):
        line = " ".join([name, *arguments])
        raise ConfigError(f"{name}: a command must come first, such as gerl train {line}; gerl --help lists all")
    near = get_close_matches(name.lower(), COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
    hint = OTHER_WORDS.get(name.lower(), hint)
    raise ConfigError(f"{name}: there is no such command; {hint}")
