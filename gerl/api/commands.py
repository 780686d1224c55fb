"""`gerl.evaluate`, `gerl.score`, `gerl.export` and `gerl.preflight`: the commands as functions."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerl.api import training
from gerl.api.runs import Run, listed
from gerl.commandline.composition import compose_run, spelled
from gerl.objects import offered
from gerl.score.command import ScoredImage

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from gerl.evaluate.command import Evaluation
    from gerl.preflight.findings import Report

# arguments of `evaluate` -> keys
EVALUATED = {
    "model.path": "model", "model.lora": "lora", "data.train": "prompts", "validation.data": "prompts",
    "hydra.run.dir": "out", "reward.scorers": "reward", "experiment": "experiment", "rollout.n": "images",
}  # fmt: skip
Adapter = str | Path | Run  # a LoRA


def evaluate(
    model: str | Path | DiffusionPipeline | None = None,
    lora: Adapter | Sequence[Adapter] | Mapping[str, Adapter] = (),
    prompts: training.Prompts | None = None,
    out: str | Path | None = None,
    *,
    reward: training.Reward | None = None,
    images: int | None = None,
    roles: str | Sequence[str] = "all",
    suite: str | None = None,
    suite_prompts: str | Path | None = None,
    suite_protocol: str | None = None,
    split: bool = True,
    trust: bool = False,
    experiment: str | Path | None = None,
    overrides: Sequence[str] = (),
    **keys: Any,
) -> Evaluation:
    """Sample the same prompts from the same noise with the base model and with each LoRA, score and compare them.

    The arguments are those of the command line, see docs/evaluate.md. `model`: also a pipeline in memory. `lora`: one,
    several, or by name; a run stands for its best checkpoint. `roles`: of a run with episodes, those whose LoRA is also
    evaluated alone. `split`: whether that checkpoint is chosen on other prompts than those reported. `trust`: whether
    code that the settings of the LoRAs' run name may run, see docs/resume.md. `reward`, `prompts` and `keys`: as for
    `gerl.train`; they replace those of the configuration. `out`: output folder; None: nothing is written. `overrides`:
    keys as on the command line.

    Raises:
        GerlError: model, LoRAs, prompts or scorers are wrong, or no image has a total; finished results are
            written to `out` first, also after a KeyboardInterrupt.
    """
    from gerl.evaluate.command import Options, prepare, run  # imported here: needs the packages of the scorers

    scorers = training.Scorers() if reward is None else training.scorers_of(reward)
    chosen = [f"experiment={experiment}"] if experiment else []
    chosen += [f"reward.scorers={spelled(scorers.keys)}"] if scorers.keys else []
    chosen += [*training.overrides_of(training.nested(keys, arguments=EVALUATED)), *overrides]
    if isinstance(lora, Mapping):
        pairs: list[tuple[str | None, Adapter]] = list(lora.items())
    else:
        pairs = [(None, one) for one in ([lora] if isinstance(lora, str | Path | Run) else lora)]
    with tempfile.TemporaryDirectory() as folder, offered(scorers.functions, {}):
        here = Path(folder)
        if model is not None and not isinstance(model, str | Path):
            chosen.append(f"model.dtype={str(model.dtype).removeprefix('torch.')}")
            model = training.path_of(model, here / "base")
        options = Options(
            model=None if model is None else str(model),
            lora=[(name, str(one.folder if isinstance(one, Run) else one)) for name, one in pairs],
            prompts=None if prompts is None else training.write_prompts(prompts, here / "prompts.jsonl"),
            out=None if out is None else Path(out).expanduser(),
            images=images,
            roles=roles if isinstance(roles, str) else ",".join(roles) or "none",
            suite=suite,
            suite_prompts=None if suite_prompts is None else str(suite_prompts),
            suite_protocol=suite_protocol,
            split=split,
            trust=trust,
        )
        return run(prepare(options, chosen))


def score(
    images: Any,
    prompts: str | Path | Sequence[str | Mapping[str, Any]] | None = None,
    reward: training.Reward = "ocr",
    *,
    out: str | Path | None = None,
    batch: int | None = None,
    **keys: Any,
) -> list[ScoredImage]:
    """Score images; returns them in order, each with its `values` by column and, if one is missing, its `failure`.

    `images`: a folder or file, as for the command, or a list of files, PIL images, arrays or tensors. `prompts`: one
    for all images, a file, or one per image: a string, or a dictionary with the key `prompt` and further columns.
    `reward` and `keys`: as for `gerl.train`. `out`: a folder for tables and a gallery; None: nothing is written. Raises
    `GerlError` as the command does.
    """
    from gerl.score.command import Request, run  # imported here: needs the packages of the scorers

    scorers = training.scorers_of(reward)
    arguments = {"reward.scorers": "reward", "hydra.run.dir": "out", "data.train": "prompts"}
    values = training.nested(keys, arguments=arguments)
    values["reward"] = {**values.get("reward", {}), "scorers": scorers.keys}
    with tempfile.TemporaryDirectory() as folder, offered(scorers.functions, {}):
        here = Path(folder)
        config = compose_run([f"experiment={training.write_experiment(here, 'score', 'plain', None, values)}"]).config
        place = Path(out).expanduser() if out is not None else here / "out"
        if isinstance(images, str | Path):
            file = prompts is not None and isinstance(prompts, str | Path) and Path(prompts).is_file()
            prompt_option: dict[str, Any] = {
                ("prompts" if file else "prompt"): None if prompts is None else str(prompts)
            }
            return run(Request(images=str(images), out=place, batch=batch, **prompt_option), config)
        return run(Request(images=str(listed(images, prompts, here)), out=place, batch=batch), config)


def export(
    run: Run | str | Path, out: str | Path | None = None, format: str | None = None, **options: Any
) -> list[Path]:
    """Write the LoRA of a run in another program's format; returns the files.

    `format` and `options` are the keys of the command: `python -m gerl.export --help`. Raises `GerlError` as it does.
    """
    from gerl.export.command import PARSER
    from gerl.export.command import run as write

    folder = run.folder if isinstance(run, Run) else Path(run).expanduser()
    place = None if out is None else Path(out).expanduser()
    values = {"run": folder, "out": place, "format": format, **options}
    shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return write(PARSER.parse([f"{name}={value}" for name, value in shown.items() if value is not None])[0])


def preflight(
    pipe: str | Path | DiffusionPipeline | None = None,
    reward: training.Reward | None = None,
    prompts: training.Prompts | None = None,
    *,
    experiment: str | Path | None = None,
    **keys: Any,
) -> Report:
    """Sample and train on one prompt, and report whether and how fast `gerl.train` could train with these arguments.

    A pipeline in memory is not changed. Raises `TrainingError` if it cannot be trained.
    """
    from gerl.preflight.command import run

    with tempfile.TemporaryDirectory() as folder:
        base = experiment or ("plain" if reward is None or prompts is None else None)
        trainer = training.Trainer(pipe, reward, prompts, experiment=base, out=Path(folder) / "run", **keys)
        with offered(trainer.scorers.functions, {}):
            config = compose_run(trainer.arguments()[0]).config
        return run(config)
