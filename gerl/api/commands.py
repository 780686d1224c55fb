"""`gerl.score`, `gerl.export` and `gerl.preflight`: the commands of these names, with objects of the program."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from gerl.api.runs import Run
from gerl.api.settings import Prompts, Reward, nested, scorers_of, write_experiment
from gerl.api.training import Trainer
from gerl.commandline.composition import compose_run
from gerl.errors import DataError
from gerl.objects import offered
from gerl.score.gallery import ScoredImage
from gerl.utils.files import write_file

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from gerl.preflight.findings import Report

Pictures = str | Path | Sequence[str | Path | Image.Image]


def score(
    images: Pictures,
    prompts: str | Path | Sequence[str | Mapping[str, Any]] | None = None,
    reward: Reward = "ocr",
    *,
    out: str | Path | None = None,
    batch: int | None = None,
    **keys: Any,
) -> list[ScoredImage]:
    """Score images; returns them in their order, each with its `values` by column and, where one lacks, its `failure`.

    `images`: a folder or file, as for the command, or pictures and files. `prompts`: one for all images, a file, or one
    for each picture, a text or a dictionary with the key `prompt` and further columns. `reward` and `keys`: as for
    `gerl.train`. `out`: a folder for tables and a gallery; None: nothing is kept. Raises `GerlError`, as the command.
    """
    from gerl.score.command import Request, run  # in here: it needs the reward's packages

    scorers = scorers_of(reward)
    values = nested(keys)
    values["reward"] = {**values.get("reward", {}), "scorers": scorers.keys}
    with tempfile.TemporaryDirectory() as folder, offered(scorers.functions, {}):
        here = Path(folder)
        config = compose_run([f"experiment={write_experiment(here, 'score', 'plain', None, values)}"]).config
        place = Path(out).expanduser() if out is not None else here / "out"
        if isinstance(images, str | Path):
            file = prompts is not None and isinstance(prompts, str | Path) and Path(prompts).is_file()
            given = {("prompts" if file else "prompt"): None if prompts is None else str(prompts)}
            return run(Request(images=str(images), out=place, batch=batch, **given), config)
        listed = _listed(images, prompts, here)
        return run(Request(images=str(listed), out=place, batch=batch), config)


def _listed(
    images: Sequence[str | Path | Image.Image],
    prompts: str | Path | Sequence[str | Mapping[str, Any]] | None,
    here: Path,
) -> Path:
    """A file of images and prompts; pictures in memory are written beside it."""
    rows = [prompts] * len(images) if prompts is None or isinstance(prompts, str | Path) else list(prompts)
    if len(rows) != len(images):
        raise DataError(f"{len(rows)} prompts for {len(images)} images: give one for each, or one for all")
    lines = []
    for i, (image, row) in enumerate(zip(images, rows, strict=True)):
        if isinstance(image, Image.Image):
            path = here / f"{i}.png"
            image.convert("RGB").save(path)
        else:
            path = Path(image).expanduser().absolute()
        columns = {"prompt": "" if row is None else str(row)} if not isinstance(row, Mapping) else dict(row)
        lines.append(json.dumps({**columns, "image": str(path)}, ensure_ascii=False))
    file = here / "images.jsonl"
    write_file(file, "\n".join(lines) + "\n")
    return file


def export(run: Run | str | Path, out: str | Path, format: str = "diffusers", **options: Any) -> list[Path]:
    """Write the LoRA of a run for another program; returns the files.

    `format` and `options` are the keys of the command: `python -m gerl.export --help`. Raises `GerlError`, as it does.
    """
    from gerl.export.command import PARSER
    from gerl.export.command import run as write

    folder = run.folder if isinstance(run, Run) else Path(run).expanduser()
    given = {"run": folder, "out": Path(out).expanduser(), "format": format, **options}
    texts = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items()]
    return write(PARSER.parse([text for text in texts if not text.endswith("=None")])[0])


def preflight(
    pipe: str | Path | DiffusionPipeline | None = None,
    reward: Reward | None = None,
    prompts: Prompts | None = None,
    *,
    experiment: str | None = None,
    **keys: Any,
) -> Report:
    """Draw and train on one prompt, and say whether, and how fast, the run of `gerl.train` with these could train.

    A pipeline in memory is looked at as files, and left as it is. Raises `TrainingError` if it cannot train.
    """
    from gerl.preflight.command import run

    with tempfile.TemporaryDirectory() as folder:
        base = experiment or ("plain" if reward is None or prompts is None else None)
        trainer = Trainer(pipe, reward, prompts, experiment=base, out=Path(folder) / "run", **keys)
        with offered(trainer.scorers.functions, {}):
            config = compose_run(trainer.arguments()[0]).config
        return run(config)
