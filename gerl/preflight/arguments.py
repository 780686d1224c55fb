"""Check a run before starting it: `python -m gerl.preflight [key=value ...]`, whose keys are read without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.commandline.composition import compose_run
from gerl.config import MOST_IMAGES, Config, shown
from gerl.errors import ConfigError
from gerl.preflight.sizing.hardware import GPUS, Name
from gerl.utils.imports import importing


@dataclass(frozen=True)
class Options:
    """Keys of the command itself, in addition to those of a run."""

    signal: int | None = key(
        "4; instead, sample this many batches of a training step and measure at which steps their gradients agree",
        unit="an integer of at least 2, as gradients of independent batches are compared",
        low=2,
    )
    hardware: Name | None = key(
        "h100-80gb; instead, estimate what the run would need on GPUs of this kind, which need not be present: "
        "memory per rank, work, time and the cheapest layout that fits; only configurations are loaded. One of "
        f"{', '.join(GPUS)}; for another card one with the same memory",
        unit="for another card name one with as much memory",
    )
    gpus: int = key(
        "8; how many of them, across all machines", 1, unit="an integer of at least 1, the GPUs of all machines", low=1
    )
    share: int = key(
        "40; percent of the GPU's published bf16 peak that is reached, for the times of hardware",
        40,
        unit="an integer percentage, from 1 to 100",
        low=1,
    )
    anew: bool = key("recompute the facts that hardware needs about a recipe, even if they are on record", False)
    out: Path | None = key("the report for machines, a .json file, in addition to the one on the terminal")


PARSER = Parser(
    "the preflight",
    "python -m gerl.preflight",
    "[experiment=NAME|FILE.yaml] [key=value ...] [signal=N | hardware=NAME gpus=N] [out=FILE.json]",
    "Load the model of a run, sample and train on one prompt, and report whether, and how fast, it can train.",
    Options,
    rest=True,
    notes="The other keys are those of training: python -m gerl.trainer.main_flowgrpo --help all lists them. "
    "Without signal neither rewards nor a prompt file are needed; with it both are, and the time of this many "
    "training steps. With hardware the weights are not needed either: docs/memory.md.",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line and return the exit code: 0 if the configuration can train, otherwise see `run_command`."""
    return run_command(argv, lambda: PARSER.help(program), preflight)


def preflight(arguments: list[str]) -> None:
    """Check the keys, then examine the run, measure its signal, or size it."""
    config, options = parse(arguments)
    if options.signal is not None:
        with importing():
            from gerl.preflight import signal

        signal.run(config, options.signal, options.out)
        return
    if options.hardware is not None:
        with importing():
            from gerl.preflight.sizing import command

        command.run(config, options.hardware, options.gpus, options.share, options.out, options.anew)
        return
    with importing():
        from gerl.preflight.command import run

    run(config, options.out)


def parse(arguments: Sequence[str]) -> tuple[Config, Options]:
    """Return the configuration and the command's options. Raises `ConfigError` if keys contradict each other."""
    options, overrides = PARSER.parse(arguments)
    config, out, signal = compose_run(overrides).config, options.out, options.signal
    if out is not None and (out.suffix != ".json" or out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"out={out}: expected the path of a .json file in an existing folder")
    if signal is not None and (images := signal * config.rollout.prompts_per_step * config.rollout.n) > MOST_IMAGES:
        raise ConfigError(f"signal={shown(signal)}: that is {shown(images)} images, at most {MOST_IMAGES}; lower it")
    if options.hardware is None and {"gpus", "share", "anew"} & {a.partition("=")[0] for a in arguments}:
        raise ConfigError(
            "gpus, share and anew belong to hardware, which is not set: add for example hardware=h100-80gb"
        )
    if options.hardware is not None and signal is not None:
        raise ConfigError("signal needs the model, and hardware does not load it: use one of them")
    train = f"model.train={config.model.train}"
    if (context := config.cluster.context) > 1 and options.hardware is not None:
        raise ConfigError(f"hardware: the cost of cluster.context={context} is unknown; use cluster.context=1")
    if train != "model.train=lora" and signal is not None and config.lockstep:
        raise ConfigError(f"signal: with {train} each rank has only part of the gradient; use model.shard=none")
    if options.share > 100:
        raise ConfigError(f"share={options.share}: it must be an integer percentage, from 1 to 100")
    return config, options
