"""Every preset with every kind of scheduler: it trains with no further key, or is refused before anything is loaded.

`python tests/e2e/test_schedulers.py` prints the table of docs/algorithms.md.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import drills
import numpy as np
import pytest
import tiny
import yaml
from PIL import Image
from zoo.samplers import with_scheduler
from zoo.text_to_image import sdxl

from gerl.commandline.composition import compose_run, shipped
from gerl.config.samplers import CHOICES
from gerl.errors import ConfigError
from gerl.trainer.main_flowgrpo import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
KINDS: dict[str, Callable[[], Any]] = {
    "flow matching": tiny.sd3,
    "DDIM": tiny.sd15,
    "EDM": lambda: with_scheduler(sdxl(), diffusers.EDMEulerScheduler()),
    "consistency": lambda: with_scheduler(tiny.sd15(), diffusers.LCMScheduler()),
}
ROWS = {  # of a file of images
    "diffusion_dpo_offline": {"chosen": "dark.png", "rejected": "bright.png"},
    "kto": {"image": "dark.png", "label": True},
    "sft": {"image": "dark.png"},
}
IMAGES = {"branch_grpo": 1, "tree_grpo": 1, "sft": 1, "kto": 1}  # of a prompt; else 2
SMALL = """
experiment=plain sampling.height=16 sampling.width=16 model.lora_rank=4 validation.data=null trainer.steps=1
rollout.prompts_per_step=2 cluster.launcher=local cluster.device=cpu cluster.threads_per_worker=1 guard.judge=off
logger.progress=false logger.tensorboard=false logger.report=false
""".split()
BRIGHT = """
def compute_score(images, prompts, metadata):
    return images.flatten(1).mean(1)

compute_score.takes_tensors = True
"""


def prepare(folder: Path) -> Path:
    """Write a pipeline of each kind, images, prompts and a scorer with a gradient."""
    for kind, build in KINDS.items():
        build().save_pretrained(folder / kind)
    for name, value in (("dark", 60), ("bright", 200)):
        Image.fromarray(np.full((16, 16, 3), value, dtype=np.uint8)).save(folder / f"{name}.png")
    for name, row in {"prompts": {}, **ROWS}.items():
        lines = [json.dumps({"prompt": prompt} | row) + "\n" for prompt in ("a red fox", "blue")]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "bright.py").write_text(BRIGHT)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("kinds"))


def arguments(place: Path, preset: str, kind: str) -> list[str]:
    """The command line; no key of it is about the sampler."""
    data = place / f"{preset if preset in ROWS else 'prompts'}.jsonl"
    regularising = [f"data.regularise={place / 'sft.jsonl'}"] if preset == "ddrl" else []
    own = [f"model.path={place / kind}", f"data.train={data}", f"reward.scorers.bright.path={place / 'bright.py'}"]
    return [*SMALL, f"algorithm={preset}", *own, f"rollout.n={IMAGES.get(preset, 2)}", *regularising]


def refusal(place: Path, preset: str, kind: str) -> str:
    """Why the preset does not train this kind; "" if it does."""
    try:
        compose_run(arguments(place, preset, kind))
    except ConfigError as error:
        return str(error).rpartition("): ")[2]
    return ""


def table(place: Path) -> list[str]:
    """The lines of the table in the docs: what `auto` is, then the presets by what they train."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for preset in shipped("algorithm"):
        reasons = [refusal(place, preset, kind).removeprefix(f"{preset} ") for kind in KINDS]
        cells = (*("no" if why else "yes" for why in reasons), next(filter(None, reasons), ""))
        rows.setdefault(cells, []).append(f"`{preset}`")
    auto = [f"sampling.{key}=auto" for key in CHOICES]
    chosen = [compose_run([*arguments(place, "flow_grpo", kind), *auto]).config.sampling for kind in KINDS]
    values = [f"`{sampling.kernel}`, `{sampling.solver}`, `{sampling.sigmas}`" for sampling in chosen]
    usual = max(rows, key=lambda cells: len(rows[cells]))
    names = {cells: ", ".join(presets) for cells, presets in rows.items() if cells != usual}
    lines = [("`auto`: kernel, solver, sigmas", *values, ""), (f"the other {len(rows[usual])}", *usual)]
    lines += [(presets, *cells) for cells, presets in names.items()]
    return [f"| {' | '.join(line)} |".replace("  ", " ") for line in [("", *KINDS, "because"), ("---",) * 6, *lines]]


@drills.more
def test_the_table_in_the_docs_is_what_is_composed(place: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [line for line in table(place) if line not in text.splitlines()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", [p for p in shipped("algorithm") if drills.sampled(p, ("awm_fast", "srpo"))])
def test_a_preset_trains_or_is_refused_before_loading(
    preset: str, kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = refusal(place, preset, kind)
    code = main([*arguments(place, preset, kind), f"hydra.run.dir={tmp_path / 'run'}"])
    if refused:
        assert code == 2 and refused in capsys.readouterr().err and not (tmp_path / "run").exists()
        return
    assert code == 0
    (row,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["actor/grad_norm"] > 0
    sampling = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["sampling"]
    assert all(isinstance(sampling[key], str) and sampling[key] != "auto" for key in CHOICES)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(table(prepare(Path(folder)))))  # noqa: T201
