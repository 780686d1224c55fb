"""Whole runs on images of files: each algorithm follows what the file says of them, and the reverse if it says that."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from diffusers import AutoencoderKL
from PIL import Image

import gerl

Train = Callable[..., Any]
EASY = """
sampling.height=32 sampling.width=32 sampling.num_inference_steps=5 validation.num_inference_steps=4 model.lora_alpha=32
actor.lr=0.02 actor.ema_decay=0.5 rollout.prompts_per_step=6 rollout.micro_batch_size=12 trainer.steps=2
validation.every=0 checkpoint.every=0 algorithm.timesteps=2
""".split()
PROMPTS = ["a red fox", "blue", "x y", "seven", "a cat", "a dog"]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Stable Diffusion 3 with the VAE of the signs, which knows what bright is."""
    pipe = tiny.sd3()
    pipe.register_modules(vae=AutoencoderKL.from_pretrained(Path(gerl.__file__).parent / "assets" / "signs" / "vae"))
    folder = tmp_path_factory.mktemp("model") / "sd3"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bright and a dark picture for each prompt, of another size than is trained on."""
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(len(PROMPTS)):
        for name, low in (("bright", 180), ("dark", 0)):
            pixels = generator.integers(low, low + 75, (40, 36 + i, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}_{i}.png")
    return folder


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(chosen: str, rejected: str) -> list[dict[str, Any]]:
    return [
        {"prompt": text, "chosen": f"{chosen}_{i}.png", "rejected": f"{rejected}_{i}.png"}
        for i, text in enumerate(PROMPTS)
    ]


def labels(liked: str) -> list[dict[str, Any]]:
    return [
        {"prompt": text, "image": f"{name}_{i}.png", "label": name == liked}
        for i, text in enumerate(PROMPTS)
        for name in ("bright", "dark")
    ]


def singles(name: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "image": f"{name}_{i}.png"} for i, text in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    ("algorithm", "rows", "settings"),
    [
        ("sft", {"bright": singles("bright"), "dark": singles("dark")}, ""),
        (
            "diffusion_dpo_offline",
            {"bright": pairs("bright", "dark"), "dark": pairs("dark", "bright")},
            "algorithm.beta=50",
        ),
        ("kto", {"bright": labels("bright"), "dark": labels("dark")}, "algorithm.beta=50 rollout.prompts_per_step=12"),
    ],
)
def test_held_out_images_become_like_those_that_are_preferred(
    algorithm: str,
    rows: dict[str, Any],
    settings: str,
    train: Train,
    assert_replayed: Callable[[Any], None],
    seeing: Path,
    pictures: Path,
    workplace: Path,
    tmp_path: Path,
) -> None:
    change = {}
    for name, given in rows.items():
        data = written(pictures, f"{algorithm}_{name}", given)
        keys = [*EASY, *settings.split(), f"validation.data={workplace / 'val.txt'}", "trainer.dump=2"]
        run = train(tmp_path / name, f"algorithm={algorithm}", *keys, data__train=data, model__path=seeing)
        bright = run.column("val/bright/mean")
        change[name] = bright[-1] - bright[0]
        assert run.column("reward/mean") == [] and len(run.column("actor/loss")) == 2
    assert_replayed(run)
    assert change["bright"] > 0.001 and change["dark"] < -0.001, change


def test_data_beside_reinforcement_learning_holds_the_policy_near_to_it(
    train: Train,
    assert_replayed: Callable[[Any], None],
    seeing: Path,
    pictures: Path,
    workplace: Path,
    tmp_path: Path,
) -> None:
    data, found = written(pictures, "dark", singles("dark")), {}
    for coef in (0, 3):
        keys = [] if coef == 0 else [f"data.regularise={data}", f"algorithm.data_coef={coef}"]
        easy = ["algorithm=ddrl", "algorithm.data_coef=0", *EASY[:-1], "rollout.prompts_per_step=3", "trainer.steps=2"]
        keys = [*easy, f"validation.data={workplace / 'val.txt'}", "trainer.dump=2", *keys]
        run = train(tmp_path / str(coef), *keys, model__path=seeing)
        bright = run.column("val/bright/mean")
        found[coef] = bright[-1] - bright[0]
        assert len(run.column("actor/data_error")) == (2 if coef else 0) and len(run.column("reward/mean")) == 2
    assert_replayed(run)
    assert found[3] < found[0] - 0.01, found


def test_a_run_without_a_scorer_is_resumed_and_shared_by_workers(
    train: Train, seeing: Path, pictures: Path, workplace: Path, tmp_path: Path
) -> None:
    keys = [*EASY, "algorithm=kto", "algorithm.beta=50", f"validation.data={workplace / 'val.txt'}"]
    keys += ["checkpoint.every=1", f"data.cache={tmp_path / 'cache'}", "rollout.micro_batch_size=5"]
    keys += ["rollout.prompts_per_step=5", "reward.scorers={}"]  # pairs, of which a micro-batch has parts
    given = {"data__train": written(pictures, "kto", pairs("bright", "dark")), "model__path": seeing, "scorer": ""}
    whole = train(tmp_path / "whole" / "run", *keys, **given)
    assert len(list((tmp_path / "cache" / "images").rglob("*.safetensors"))) == 2 * len(PROMPTS)
    half = tmp_path / "half" / "run"
    train(half, *keys, **given, trainer__steps=1)
    resumed = train(half, *keys, f"checkpoint.resume={half}", **given)
    resumed.assert_same(whole, 2)
    shared = train(tmp_path / "shared" / "run", *keys, **given, cluster__num_workers=2)
    assert np.allclose(shared.lora(2), whole.lora(2), rtol=1e-3, atol=1e-5)
    assert not [name for row in whole.metrics for name in row if "reward/" in name or name.startswith("health/highest")]
    assert whole.column("actor/preference_margin")[-1] > 0
