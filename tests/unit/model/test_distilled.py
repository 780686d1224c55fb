"""Models of few steps are known by their scheduler or name, and trainings that harm them are warned of."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from gerl.commandline.composition import compose_run
from gerl.commandline.experiments import experiments
from gerl.config import Config, ModelConfig, SamplingConfig, algorithm_config
from gerl.model.distilled import distilled_warnings, few_steps, guidance_notes
from gerl.workers.setup import load_worker_policy, model_facts

EULER = "FlowMatchEulerDiscreteScheduler"
FEW = """
black-forest-labs/FLUX.1-schnell stabilityai/sd-turbo
stabilityai/stable-diffusion-3.5-large-turbo Tongyi-MAI/Z-Image-Turbo
ByteDance/SDXL-Lightning SimianLuo/LCM_Dreamshaper_v7 Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers
black-forest-labs/FLUX.2-klein-4B models/sdxl_4step folder/my-8-steps/ Lightricks/LTX-Video-0.9.8-13B-distilled
ByteDance/Hyper-SD owner/wan-dmd
""".split()
MANY = """
black-forest-labs/FLUX.1-dev black-forest-labs/FLUX.2-klein-base-4B stabilityai/stable-diffusion-xl-base-1.0 signs
turbo/sdxl nyanko7/flux-dev-de-distill my-18-steps hyperrealism hunyuan-guidance-distilled Wan-AI/Wan2.1-T2V-1.3B
""".split()


@pytest.mark.parametrize("path", FEW)
def test_a_name_says_few_steps(path: str) -> None:
    assert "its name has" in (few_steps(path, EULER) or "")


@pytest.mark.parametrize("path", MANY)
def test_a_name_says_nothing(path: str) -> None:
    assert few_steps(path, EULER) is None
    assert few_steps(path, "LCMScheduler") == "it comes with LCMScheduler"


@pytest.mark.parametrize(
    ("algorithm", "kernel", "expected"),
    [
        ("awm", "ode", "algorithm.name=awm trains on noised images.*few_step_grpo"),
        ("diffusion_dpo", "ode", "algorithm.name=diffusion_dpo"),
        ("flow_grpo", "flow_sde", "sampling.kernel=flow_sde.*use kernel=cps"),
        ("flow_grpo", "cps", None),
        ("neighbor_grpo", "ode", None),
        ("opd", "cps", None),
    ],
)
def test_what_harms_a_model_of_few_steps_is_warned_of(algorithm: str, kernel: Any, expected: str | None) -> None:
    more: dict[str, Any] = {"same_init_noise": True, "init_noise_spread": 0.3} if algorithm == "neighbor_grpo" else {}
    keys = {"sampling": SamplingConfig(kernel=kernel, **more), "algorithm": algorithm_config(algorithm)}
    few, many = (Config(model=ModelConfig(path=path), **keys) for path in ("a/x-turbo", "a/x"))
    found = distilled_warnings(few, EULER)
    assert distilled_warnings(many, EULER) == [] and len(found) == (expected is not None)
    if expected is not None:
        with pytest.raises(AssertionError, match=rf"a/x-turbo is a few-step model .*'turbo'.*{expected}"):
            raise AssertionError(found[0])


def test_no_recipe_is_warned_of() -> None:
    for name in experiments():
        assert distilled_warnings(compose_run([f"experiment={name}"]).config, EULER) == []


def test_a_loaded_model_tells_of_itself(tmp_path: Path) -> None:
    tiny.sd3().save_pretrained(tmp_path / "sd3-turbo")
    c = Config(model=ModelConfig(path=str(tmp_path / "sd3-turbo"), lora_rank=2), algorithm=algorithm_config("awm"))
    facts = model_facts(load_worker_policy(c, "cpu", None), c, ["a"])
    assert facts.notes == ["a"] and len(facts.warnings) == 1 and "sd3-turbo" in facts.warnings[0]
    assert guidance_notes({"sd3": tiny.sd3().transformer, "unknown": torch.nn.Linear(1, 1)}) == []
    (note,) = guidance_notes({"transformer": tiny.flux().transformer})
    assert note.startswith("the guidance of transformer is one of its inputs")
