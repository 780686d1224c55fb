from pathlib import Path
from typing import Any

import numpy as np

from gerl.run.usage import usage
from gerl.run.validation import SamplingRecord, Validation
from gerl.utils.versions import DTYPE

CONFIG: dict[str, Any] = {
    "model": {"path": "owner/model", "dtype": "auto"},
    "sampling": {"height": 64, "width": None, "num_inference_steps": 10, "guidance_scale": 4.5,
                 "call": {"negative_prompt": "it's"}},
    "validation": {"num_inference_steps": 40, "guidance_scale": None},
}  # fmt: skip


def validation(step: int, **drawing: Any) -> Validation:
    how = SamplingRecord(**{"seeds": [3, 4], "given": [{}, {}], "device": "cuda", **drawing})
    pixels = [np.zeros((4, 4, 3), np.uint8)] * 2
    return Validation(step, ["no", "a 'sign'", "x"], [1.0] * 3, {}, [1, 2], pixels, how)


def run(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / "checkpoints" / f"step_{step}" / "lora").mkdir(parents=True)
    return folder


def arguments(code: str) -> tuple[str, dict[str, str]]:
    lines = code.split("output = pipe(\n")[1].split("\n)")[0].splitlines()
    prompt, *named = (line.strip().removesuffix(",") for line in lines)
    return prompt, dict(line.split("=", 1) for line in named)


def test_the_call_is_that_of_the_validation(tmp_path: Path) -> None:
    code = usage(run(tmp_path, 4, 8), CONFIG, [validation(0), validation(4), validation(8)])
    assert code is not None
    compile(code, "", "exec")
    assert arguments(code) == (
        repr("a 'sign'"),
        {"height": "64", "num_inference_steps": "40", "guidance_scale": "4.5", "negative_prompt": repr("it's"),
         "generator": "torch.Generator().manual_seed(3)"},
    )  # fmt: skip
    assert f"{DTYPE}=torch.bfloat16" in code and 'pipe.to("cuda")' in code and "'owner/model'" in code
    assert f"pipe.load_lora_weights({str(tmp_path / 'checkpoints/step_8/lora')!r})" in code


def test_picture_and_lora_are_of_the_same_step(tmp_path: Path) -> None:
    stopped = usage(run(tmp_path, 4, 9), CONFIG, [validation(0), validation(4), validation(8)])
    assert stopped is not None and "step_4/lora" in stopped and "manual_seed(3)" in stopped
    unseen = usage(tmp_path, CONFIG, [validation(0), validation(8)])
    assert unseen is not None and "step_9/lora" in unseen and "manual_seed" not in unseen
    assert arguments(unseen)[0] == "'a prompt'"
    assert usage(tmp_path / "nothing", CONFIG, [validation(0)]) is None


def test_pictures_videos_schedulers_and_other_denoisers(tmp_path: Path) -> None:
    lines = ["pipe.load_lora_weights(FOLDER)", "pipe.b.load_lora_adapter(FOLDER, prefix='b', use_safetensors=True)"]
    given = [{"image": "a.png", "control_image": ["b.png", "c.png"]}, {}]
    found = validation(8, device="cpu", given=given, video=True, scheduler="UniPCMultistepScheduler", lora_lines=lines)
    code = usage(run(tmp_path, 8), CONFIG, [found])
    assert code is not None
    compile(code, "", "exec")
    named = arguments(code)[1]
    assert named["image"] == "load_image('a.png')" and "load_image('c.png')]" in named["control_image"]
    for part in ("dtype=torch.float32", "export_to_video(output.frames[0]", "trainable_scheduler(pipe.scheduler)"):
        assert part in code
    assert f"pipe.b.load_lora_adapter({str(tmp_path / 'checkpoints/step_8/lora')!r}, prefix='b'" in code
    own = usage(tmp_path, CONFIG, [validation(8, lora_lines=["load_lora(pipe, Path(FOLDER))"])])
    assert own is not None and "from gerl.model.lora_files import load_lora" in own and "load_lora(pipe, Path('" in own
