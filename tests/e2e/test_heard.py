"""What a run says about its input: sizes, guidance and prompts that the pipeline does not take as they were given."""

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
from heard import heard

import gerl
from gerl.errors import DataError, ModelError

SMALL: dict[str, Any] = {
    "rollout.prompts_per_step": 2,
    "rollout.n": 2,
    "validation.num_inference_steps": 2,
    "logger": {"progress": False, "tensorboard": False, "report": False},
    "cluster.threads_per_worker": 1,
    "algorithm": "flow_grpo",
}
LONG = ["a fox " * 60 + "in red", "a fox " * 60 + "in blue", "a fox"]


def bright(images: list[Any]) -> list[float]:
    return [sum(image.convert("L").getdata()) / 255 / image.width / image.height for image in images]


def lines(pipe: diffusers.DiffusionPipeline, out: Path, prompts: list[str], **sampling: Any) -> list[str]:
    """What is said in a run of one step."""
    settings = {"height": 16, "width": 16, "num_inference_steps": 3, **sampling}
    with heard() as said:
        gerl.train(pipe, bright, prompts, held_out=prompts[:1], steps=1, out=out, sampling=settings, **SMALL)
    return said()


def test_a_size_that_would_be_rounded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"sampling\.height=27.* multiples of 16 pixels; use 16 or 32"):
        lines(tiny.qwen_image(), tmp_path / "run", ["a", "b"], height=27, width=32)
    said = lines(tiny.qwen_image(), tmp_path / "run", ["a", "b"], height=16, width=32)
    assert len([line for line in said if "true_cfg_scale" in line and "negative_prompt" in line]) == 1


def test_prompts_that_are_cut(tmp_path: Path) -> None:
    kernel = {"kernel": "ddim", "guidance_scale": 1.0}
    said = lines(tiny.sd15(), tmp_path / "run", LONG, **kernel)
    assert len([line for line in said if line.startswith("2 of 3 prompts exceed the 14 tokens")]) == 1
    assert not any("was truncated" in line for line in said), "counted, not repeated for each"

    def overlong(what: str) -> dict[str, Any]:
        given = {"height": 16, "width": 16, "num_inference_steps": 3, **kernel}
        return {"sampling": given, "data.overlong": what, "steps": 1, "out": tmp_path / "dropped", **SMALL}

    with pytest.raises(DataError, match=r"data\.overlong=error: prompt 0"):
        gerl.train(tiny.sd15(), bright, LONG, **overlong("error"))
    with heard() as heard_of:
        run = gerl.train(tiny.sd15(), bright, [*LONG, "blue"], held_out=LONG, **overlong("drop"))
    assert any("keeps 2 of 4 training prompts and 1 of 3 held-out ones" in line for line in heard_of())
    assert {picture.prompt for picture in run.images()} == {"a fox"}


def test_an_evaluation_says_the_same(tmp_path: Path) -> None:
    with heard() as said:
        gerl.evaluate(
            tiny.qwen_image(), prompts=["a", "b" * 600], reward=bright, overrides=["logger.progress=false"],
            **{"sampling.height": 27, "sampling.width": 36, "validation.num_inference_steps": 2},
            **{"cluster.launcher": "local", "cluster.threads_per_worker": 1},
        )  # fmt: skip
    assert any(re.search(r"27 x 36.*16 x 32", line) for line in said())
    assert any("true_cfg_scale" in line and "negative_prompt" in line for line in said())
    assert any(line.startswith("1 of 2 prompts exceed the 512 tokens") for line in said())
