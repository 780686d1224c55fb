"""The recipes of `configs/experiment` for models of the hub: settings, and two steps on the pipeline built tiny."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
import transformers
from PIL import Image
from zoo.base import LONG, MEDIUM, SHORT, as_class
from zoo.conditioned import KONTEXT, qwen_edit
from zoo.text_to_image import UNBINNED, PictureProcessor, flux2, flux2_klein, hidream, lumina2, sana, sdxl

from gerl.commandline.composition import compose_run, config_folder, experiments
from gerl.rewards.scorers import build_scorer
from gerl.trainer.main_flowgrpo import main

RECIPES = [name for name in experiments() if name not in ("plain", "signs")]
HEADINGS = ("Numbers: ", "8 GPUs: ", "1 GPU: ", "Memory of a GPU, computed, not measured: ")
BRIGHTNESS = """
import numpy as np

def compute_score(images, prompts, metadata, **kwargs):  # those of the scorer it stands in for
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""


@dataclass(frozen=True)
class Tiny:
    """The pipeline of a recipe, small and with random weights, and what must be said to it because it is small."""

    build: Callable[[], Any]
    scheduler: Any = None  # as in the hub repository, where it is not the flow-matching Euler
    size: int = 16
    call: dict[str, Any] = field(default_factory=dict)


def hidream_of_large_patches() -> Any:
    """With a VAE that compresses nothing: the pipeline always draws 128 x 128 latents."""
    pipe = hidream()
    transformer = type(pipe.transformer).from_config(pipe.transformer.config, patch_size=16, max_resolution=(128, 128))
    vae = tiny.vae(blocks=1, shift_factor=0.06, mid_block_add_attention=False)
    return as_class(pipe, type(pipe), transformer=transformer, vae=vae)


FLOW: dict[str, Any] = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
NOISE: dict[str, Any] = dict(beta_schedule="scaled_linear", steps_offset=1)
TINY = {
    "sd35_medium_ocr": Tiny(tiny.sd3, call=SHORT),
    "sd35_large_pickscore": Tiny(tiny.sd3, call=SHORT),
    "flux1_dev_pickscore": Tiny(tiny.flux, call=SHORT),
    "flux1_kontext_geneval": Tiny(lambda: as_class(tiny.flux(), diffusers.FluxKontextPipeline), call=KONTEXT),
    "flux2_klein_4b_pickscore": Tiny(flux2_klein, call={**LONG, "text_encoder_out_layers": [0, 1]}),
    "flux2_dev_pickscore": Tiny(flux2, call={**LONG, "text_encoder_out_layers": [0, 1]}),
    "qwen_image_ocr": Tiny(tiny.qwen_image),
    "qwen_image_edit_geneval": Tiny(lambda: qwen_edit(diffusers.QwenImageEditPipeline), size=256),
    "z_image_pickscore": Tiny(tiny.z_image),
    "sana_pickscore": Tiny(
        sana, diffusers.DPMSolverMultistepScheduler(**FLOW), 32, {**UNBINNED, "complex_human_instruction": None}
    ),
    "lumina2_pickscore": Tiny(lumina2, size=32, call=LONG),
    "hidream_pickscore": Tiny(hidream_of_large_patches, diffusers.UniPCMultistepScheduler(**FLOW), call=SHORT),
    "wan21_1b3_ocr": Tiny(tiny.wan, diffusers.UniPCMultistepScheduler(**FLOW), call={**MEDIUM, "num_frames": 5}),
    "sdxl_pickscore": Tiny(sdxl, diffusers.EulerDiscreteScheduler(**NOISE, timestep_spacing="leading")),
    "sd15_aesthetic": Tiny(tiny.sd15, diffusers.PNDMScheduler(**NOISE, skip_prk_steps=True)),
}
PICTURES = ("flux1_kontext_geneval", "qwen_image_edit_geneval")  # whose prompts come with a picture


def test_every_recipe_has_a_tiny_pipeline() -> None:
    assert sorted(TINY) == sorted(RECIPES)


def header(name: str) -> list[str]:
    """The comment that a recipe begins with, a string a paragraph."""
    text = (config_folder() / "experiment" / f"{name}.yaml").read_text()
    lines = [line.removeprefix("#").removeprefix(" ") for line in text.split("\n\n")[0].splitlines()[1:]]
    marked = "\n".join(f"\0{line}" if not line or line.startswith(HEADINGS) else line for line in lines)
    return [" ".join(part.split()) for part in marked.split("\0")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_where_its_numbers_come_from_and_what_it_needs(name: str) -> None:
    said = {heading: [p for p in header(name) if p.startswith(heading)] for heading in HEADINGS}
    assert all(len(found) == 1 for found in said.values()), said
    assert re.search(r"about \d+ GB", said["Memory of a GPU, computed, not measured: "][0])
    sources = set(re.findall(r"\[\d\]", said["Numbers: "][0]))
    body = (config_folder() / "experiment" / f"{name}.yaml").read_text().split("\n\n", 1)[1]
    for line in body.splitlines():
        if re.search(r": \[?[-+]?\d", line.split("#")[0]):  # a number or a list of them
            comment = line.partition(" # ")[2]
            assert comment.startswith("ours: ") or set(re.findall(r"\[\d\]", comment)) & sources, line
    assert set(re.findall(r"\[\d\]", body)) <= sources


def test_the_clip_range_of_qwen_image_ocr_is_that_of_its_source() -> None:
    """1e-5: verl-omni, examples/flowgrpo_trainer/qwen_image/run_qwen_image_ocr_lora.sh, line 42."""
    algorithm: Any = compose_run(["experiment=qwen_image_ocr"]).config.algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (1e-5, 1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_for_eight_gpus_and_for_one(name: str) -> None:
    (one,) = (p for p in header(name) if p.startswith("1 GPU: "))
    overrides = one.removeprefix("1 GPU: ").partition(" (")[0].split()
    eight, single = (compose_run([f"experiment={name}", *more]).config for more in ([], overrides))
    images = [c.rollout.prompts_per_step * c.rollout.n for c in (eight, single)]
    assert images[0] >= 8 * images[1] / 2 > 0, "one GPU has no more than twice the images of one of eight"
    assert eight.rollout.micro_batch_size * 8 <= images[0]
    assert replace(single.model, shard=eight.model.shard, offload=eight.model.offload) == eight.model
    for scorer, config in eight.reward.scorers.items():
        build_scorer(scorer, config)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Prompts with a picture each, in its colours."""
    rows = []
    for i, colour in enumerate(("red", "blue", "green", "white")):
        Image.new("RGB", (24, 16), colour).save(tmp_path / f"{i}.png")
        rows.append(json.dumps({"prompt": f"make it {colour}", "image": f"{i}.png"}))
    (tmp_path / "pictures.jsonl").write_text("\n".join(rows))
    return tmp_path / "pictures.jsonl"


@pytest.fixture(autouse=True)
def picture_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-Image-Edit's processor without its video part, which needs torchvision, where pipelines look for it."""
    monkeypatch.setattr(transformers, "PictureProcessor", PictureProcessor, raising=False)


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps_of_a_recipe(
    name: str, arguments: Callable[..., list[str]], pictures: Path, tmp_path: Path, run_of: Callable[[Path], Any]
) -> None:
    given, recipe = TINY[name], compose_run([f"experiment={name}"]).config
    torch.manual_seed(0)
    pipe = given.build()
    pipe.scheduler = given.scheduler or pipe.scheduler
    pipe.save_pretrained(tmp_path / "model")
    index = tmp_path / "model" / "model_index.json"
    index.write_text(re.sub(r'"[^"]+"(,\s*"PictureProcessor")', r'"transformers"\1', index.read_text()))
    end = (recipe.sampling.window_range or [0, 0])[1] or 0
    keys: dict[str, Any] = {
        "experiment": name,
        "model.path": tmp_path / "model",
        "model.lora_rank": 2,
        "sampling.height": given.size,
        "sampling.width": given.size,
        "sampling.num_inference_steps": max(end, recipe.sampling.window_size or 0, 2) + 1,
        "rollout.n": 2,
        "rollout.micro_batch_size": 2,
        "checkpoint.every": 0,
        "model.shard": "none",
        "cluster.ranks_per_worker": 1,
        # as in the recipe, not as in the other tests' runs
        "model.lora_alpha": recipe.model.lora_alpha,
        "sampling.guidance_scale": "null" if recipe.sampling.guidance_scale is None else recipe.sampling.guidance_scale,
        "sampling.call": "{}",
    }
    keys |= {"data.train": pictures} if name in PICTURES else {}
    keys |= {f"sampling.call.{key}": "null" if value is None else value for key, value in given.call.items()}
    (tmp_path / "brightness.py").write_text(BRIGHTNESS)
    keys |= {f"reward.scorers.{scorer}.path": tmp_path / "brightness.py" for scorer in recipe.reward.scorers}
    assert main(arguments(tmp_path / "run", scorer="", **keys)) == 0
    run = run_of(tmp_path / "run")
    assert len(run.column("reward/mean")) == 2 and max(run.column("actor/grad_norm")) > 0
    if recipe.algorithm.needs.ratio:
        assert max(run.column("actor/ratio_deviation")) < 1e-5
    else:
        assert run.column("actor/ratio_deviation") == []  # nothing is compared with the rollout
    assert torch.isfinite(run.lora(2)).all()
