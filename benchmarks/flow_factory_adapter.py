"""Rows of the ladder that Flow-Factory trains; gerl validates their LoRAs.

A row names one of Flow-Factory's published configurations as its `preset`. The protocol overrides model, prompts,
reward, images per step, LoRA, denoising steps, learning rate and seed; everything else stays as published. A run has
two parts: Flow-Factory trains in its own environment (flow_factory_launcher.py) and saves LoRAs; then gerl validates
each of them, by the first validation of a run with `model.lora`. Metrics and validations are written to a run folder
like one of gerl's, from which ladder.py reads the result.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel
from forked import main as run_gerl
from ladder import HERE, Job, Row

from gerl.commandline.composition import compose_run
from gerl.config import Config
from gerl.data.sources import load
from gerl.model.lora import find_targets
from gerl.model.paths import resolve
from gerl.run.tracking import METRICS, read_metrics

COMMIT = "a0b2bc5"  # of Flow-Factory, whose presets and keys are used
LAUNCHER = HERE / "flow_factory_launcher.py"
OWN = "flow_factory."  # before the names of its keys in those of a row
COUNTS, LORAS, RUN = "counts.jsonl", "validations", "run"
FIRST = Path("validation") / "step_000000"
# gerl's keys of a run whose first validation alone is wanted, as short as there is one
VALIDATION = ("trainer.steps=1", "rollout.prompts_per_step=1", "rollout.n=2", "validation.every=0")


@dataclass(frozen=True)
class FlowFactoryRow(Row):
    """A row on a task that Flow-Factory trains; keys: those of gerl that the protocol shares."""

    preset: str = ""
    most_steps: int = 10
    folder: Path | None = None  # of Flow-Factory

    def job(self, stage: str, rate: float, seed: int, steps: int) -> "FlowFactoryJob":
        return FlowFactoryJob(self, stage, rate, seed, steps)


@dataclass(frozen=True)
class FlowFactoryJob(Job):
    """A run of a row that Flow-Factory trains."""

    row: FlowFactoryRow

    def arguments(self, folder: Path) -> list[str]:
        """Return the run folder, the only argument of `train`."""
        return [str(folder / self.name)]

    def train(self, arguments: list[str]) -> int:
        """Train and validate; returns the exit code, 0 if Flow-Factory came to its end and all LoRAs are validated."""
        folder = Path(arguments[0])
        (folder / "data").mkdir(parents=True)
        config = compose_run(self.shared_keys()).config
        prompts = [prompt.text for prompt in load(config.data.train, config.data, "data.train")]
        (folder / "data" / "train.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
        ended = self.run_launcher(config, folder)
        counts = read_counts(folder / COUNTS)
        found: dict[int, Path] = {}
        for step, lora in saved_loras(folder).items():
            run = folder / LORAS / str(step)
            failed = self.validate(lora, run)
            if not (run / FIRST).with_suffix(".json").exists():
                ended = ended or failed or 1
                break
            found[step] = run
        write_run(folder, counts, found)
        if found and not ended:
            self.measure(folder, saved_loras(folder)[max(found)])
        return ended

    def run_launcher(self, config: Config, folder: Path) -> int:
        """Train; `folder` gets the configuration, the LoRAs and the counts."""
        program = self.row.folder
        assert program is not None
        said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=program, capture_output=True, text=True, check=True)
        if not said.stdout.startswith(COMMIT):
            raise SystemExit(f"{program} is at commit {said.stdout[:7]}, and the rows are of {COMMIT}: check that out")
        preset = yaml.safe_load((program / self.row.preset).read_text(encoding="utf-8"))
        content = configuration(preset, config, self.row.change, self.row.most_steps, folder)
        file = folder / "flow_factory.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        length = config.sampling.call.get("max_sequence_length")
        limit = [] if length is None else [f"--max-sequence-length={length}"]
        command = [str(program / ".venv" / "bin" / "python"), str(LAUNCHER), str(file), str(folder / COUNTS), *limit]
        path = os.pathsep.join([str(program / "src"), str(HERE.parent)])
        # on a CPU, as gerl's rows
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}).returncode

    def validate(self, lora: Path, folder: Path) -> int:
        """Make a run of gerl in `folder` that starts from `lora`; returns its exit code."""
        return run_gerl(self.shared_keys(*VALIDATION, f"model.lora={lora}", f"hydra.run.dir={folder}"))

    def shared_keys(self, *more: str) -> list[str]:
        """Return gerl's keys for the row and this run; later ones override equal earlier ones."""
        shared = [key for key in self.row.keys if not key.startswith(OWN)]
        return list({key.partition("=")[0]: key for key in (*shared, *self.own(), *more)}.values())


def row(name: str, task: str, content: Mapping[str, Any], rules: Mapping[str, Any]) -> FlowFactoryRow:
    """A row on a task, without its runs."""
    change = tuple(content.get("change", ()))
    own = [f"preset={content['preset']}", f"commit={COMMIT}", f"denoising_steps={rules['denoising_steps']}", *change]
    keys = (*rules["tasks"][task]["keys"], *rules["common"], *(f"{OWN}{key}" for key in own))
    fixed = {"trainer": "flow_factory", "preset": content["preset"], "most_steps": rules["denoising_steps"]}
    return FlowFactoryRow(name, task, keys, change, content.get("why", ""), **fixed)


# --- Flow-Factory's configuration


def configuration(
    preset: Mapping[str, Any], config: Config, change: Sequence[str], most_steps: int, folder: Path
) -> dict[str, Any]:
    """A published configuration with the protocol's values, those of `config`, and the row's changes."""
    content: dict[str, Any] = {key: dict(v) if isinstance(v, Mapping) else v for key, v in preset.items()}
    content |= {"config_file": None, "num_processes": 1, "rewards": [reward(config)]}
    content.pop("eval_rewards", None)
    rollout, model = config.rollout, config.model
    size = {"resolution": [config.sampling.height, config.sampling.width]}
    path = resolve(model.path)
    content["data"] |= {"dataset_dir": str(folder / "data"), "cache_dir": str(folder / "cache")}
    content["data"] |= {"max_dataset_size": None, "dataloader_num_workers": 0}
    content["model"] |= {"model_name_or_path": path, "target_modules": targets(path, model.lora_targets)}
    content["model"] |= {"finetune_type": "lora", "lora_rank": model.lora_rank, "lora_alpha": int(model.lora_alpha)}
    content["log"] |= {"save_dir": str(folder), "run_name": RUN, "save_freq": config.validation.every}
    content["log"] |= {"logging_backend": "none", "verbose": False}
    content["train"] |= {"group_size": rollout.n, "unique_sample_num_per_epoch": rollout.prompts_per_step}
    content["train"] |= {"per_device_batch_size": rollout.micro_batch_size} | size
    content["train"] |= {"guidance_scale": config.sampling.guidance_scale, "learning_rate": config.actor.lr}
    content["train"] |= {"max_epochs": config.trainer.steps, "seed": config.trainer.seed}
    content["train"]["num_inference_steps"] = min(most_steps, content["train"]["num_inference_steps"])
    content["eval"] |= {"eval_freq": 0}
    for key in change:
        name, _, value = key.partition("=")
        section, _, last = name.rpartition(".")
        (content[section] if section else content)[last] = yaml.safe_load(value)
    return content


def reward(config: Config) -> dict[str, Any]:
    """The reward: the scorer of gerl that has a weight in training."""
    ((name, scorer),) = [(n, s) for n, s in config.reward.scorers.items() if s.weight]
    settings = {"path": scorer.path, "function": scorer.function, "kwargs": dict(scorer.kwargs)}
    own = {"scorer": name, "settings": settings}  # of the launcher's class
    return {"name": name, "reward_model": f"{LAUNCHER.stem}.GerlReward", "device": "cpu", "dtype": "float32"} | own


def targets(path: str, pattern: str | None) -> list[str]:
    """Return the names of the layers that gerl trains; no target of Flow-Factory's selects all of them."""
    with init_empty_weights():
        denoiser = SD3Transformer2DModel.from_config(SD3Transformer2DModel.load_config(path, subfolder="transformer"))
    return find_targets(denoiser, pattern)


# --- What a run leaves


def read_counts(file: Path) -> list[dict[str, int]]:
    """The lines of the launcher, one per trainer step that ended."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def saved_loras(folder: Path) -> dict[int, Path]:
    """Return the saved LoRAs by trainer step."""
    found = (folder / RUN / "checkpoints").glob("checkpoint-*")
    return dict(sorted((int(lora.name.rpartition("-")[-1]), lora) for lora in found))


def write_run(folder: Path, counts: Sequence[Mapping[str, int]], validated: Mapping[int, Path]) -> None:
    """Write metrics and validations as gerl's runs have them; validated: step -> gerl's run from its LoRA."""
    lines: dict[int, dict[str, Any]] = {0: {}}
    for line in counts:
        names = {"forward": "evaluations/forward", "backward": "evaluations/backward", "images": "evaluations/images"}
        lines[line["step"]] = {name: line[key] for key, name in names.items()}
        lines[line["step"]]["actor/policy_version"] = line["updates"]
    (folder / "validation").mkdir(exist_ok=True)
    for step, run in validated.items():
        metrics = read_metrics(run / METRICS)[0]
        lines[step] |= {name: value for name, value in metrics.items() if name.startswith("val/")}
        first, copied = run / FIRST, folder / "validation" / f"step_{step:06d}"
        shutil.copy(first.with_suffix(".npz"), copied.with_suffix(".npz"))
        content = json.loads(first.with_suffix(".json").read_text(encoding="utf-8"))
        copied.with_suffix(".json").write_text(json.dumps(content | {"step": step}), encoding="utf-8")
    text = "".join(json.dumps({"step": step} | line) + "\n" for step, line in sorted(lines.items()))
    (folder / METRICS).write_text(text, encoding="utf-8")
