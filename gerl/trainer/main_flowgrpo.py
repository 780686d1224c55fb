"""The entry point: `python -m gerl.trainer.main_flowgrpo [experiment=NAME] [key=value ...]`."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gerl.cluster import Cluster
from gerl.commandline.command import run_command
from gerl.commandline.composition import Composed, compose_run
from gerl.commandline.help import help_text
from gerl.config import Config
from gerl.errors import CheckpointError, ConfigError
from gerl.model.loading import resolve
from gerl.protocol import Prompt
from gerl.rewards.checks import read_prompts
from gerl.run.checkpoint import Checkpoint, checkpoint_paths, find_run_to_resume, load_checkpoint, newest_checkpoint
from gerl.run.report import load_validation, validation_steps, write_report
from gerl.run.signals import Signals
from gerl.trainer.ray_diffusion_trainer import RayDiffusionTrainer, check_identity
from gerl.utils.dataset import fingerprint

logger = logging.getLogger("gerl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    given, program = sys.argv[1:] if argv is None else argv, "python -m gerl.trainer.main_flowgrpo"
    return run_command(argv, lambda: help_text(program, given), lambda a: run(compose_run(a)))


def run(composed: Composed) -> Path:
    """Check everything that can be checked, train, write the report; returns the run folder."""
    config, start = composed.config, time.perf_counter()
    resolve(config.model.path)
    prompts = read_prompts(config, "data.train", config.data.train)
    held_out = read_prompts(config, "validation.data", config.validation.data) if config.validation.data else []
    machines = Cluster(config.cluster, config.reward.gpu_shares)
    run_dir, checkpoint = find_checkpoint(composed)
    if checkpoint is not None:
        check_identity(checkpoint, identity(config))
    elif checkpoint_paths(run_dir / "checkpoints"):
        raise ConfigError(
            f"hydra.run.dir={run_dir}: there is a run with checkpoints in it; choose another folder, or carry that "
            f"run on with checkpoint.resume={run_dir}"
        )
    prepare_folder(run_dir, composed)
    logger.info("run folder: %s", run_dir)
    # Ray sets a SIGTERM handler of its own when it starts: ours come after it
    with machines as cluster, Signals() as signals:
        trainer = RayDiffusionTrainer(config, run_dir, cluster, prompts, held_out, identity(config), signals)
        try:
            trainer.fit(checkpoint)
        finally:
            if (run_dir / "metrics.jsonl").exists():
                write_report(run_dir)
    logger.info("%s", closing_screen(config, run_dir, held_out, time.perf_counter() - start))
    return run_dir


def identity(config: Config) -> dict[str, str]:
    """The values that a resumed run must share with the one that wrote the checkpoint, by configuration key."""
    lora = (config.model.lora_rank, config.model.lora_alpha, config.model.lora_targets)
    files = {"data.train": config.data.train, "validation.data": config.validation.data}
    return {
        "model.lora_*": repr(lora),
        "trainer.seed": str(config.trainer.seed),
        **{key: fingerprint(source) for key, source in files.items() if source},
    }


def find_checkpoint(composed: Composed) -> tuple[Path, Checkpoint | None]:
    """The run folder to write to, and the checkpoint to carry on from where `checkpoint.resume` asks for one."""
    resume = composed.config.checkpoint.resume
    if resume == "never":
        return composed.run_dir, None
    if resume == "auto":
        own = checkpoint_paths(composed.run_dir / "checkpoints")  # the same hydra.run.dir again
        run_dir = composed.run_dir if own else find_run_to_resume(composed.run_dir.parent)
        checkpoint = newest_checkpoint(run_dir / "checkpoints") if run_dir else None
        if run_dir is None or checkpoint is None or checkpoint.state["finished"]:
            logger.info("nothing to resume in %s: starting anew", composed.run_dir.parent)
            return composed.run_dir, None
        return run_dir, checkpoint
    path = Path(resume).expanduser()
    if (path / "state.json").exists():
        return path.resolve().parents[1], load_checkpoint(path)
    checkpoint = newest_checkpoint(path / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(
            f"checkpoint.resume={resume}: there is no run or checkpoint; give its folder, auto or never"
        )
    return path, checkpoint


def prepare_folder(run_dir: Path, composed: Composed) -> None:
    """Create the run folder and write `config.yaml`; raises `ConfigError` if it cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(composed.yaml(), encoding="utf-8")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"hydra.run.dir={run_dir}: the run folder cannot be written ({reason}); choose another folder"
        ) from None


def closing_screen(config: Config, run_dir: Path, held_out: Sequence[Prompt], seconds: float) -> str:
    """Reward before and after, the time it took, where things lie, and how to load the LoRA."""
    steps = validation_steps(run_dir)
    lines = ["", f"finished in {seconds / 60:.1f} min; run folder: {run_dir}"]
    if len(steps) > 1:
        first, last = (load_validation(run_dir, step) for step in (steps[0], steps[-1]))
        for name in first.by_scorer:
            scored = ([v for v in validation.by_scorer[name] if v is not None] for validation in (first, last))
            before, after = (sum(values) / len(values) if values else float("nan") for values in scored)
            lines.append(f"{name} on {len(first.prompts)} held-out prompts: {before:.3f} before, {after:.3f} after")
    lora = run_dir / "checkpoints" / f"step_{config.trainer.steps}" / "lora"
    lines += [
        f"report: {run_dir / 'report.html'}",
        f"LoRA:   {lora}",
        "",
        "load it in plain diffusers:",
        "    from diffusers import DiffusionPipeline",
        f"    pipe = DiffusionPipeline.from_pretrained({resolve(config.model.path)!r})",
        f"    pipe.load_lora_weights({str(lora)!r})",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
