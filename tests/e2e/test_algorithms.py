"""Every algorithm, picked by name with its own settings, makes a reward rise, and fall when it is negated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gerl.utils.composition import shipped

Train = Callable[..., Any]
# An easy task for random weights: a large LoRA and a high learning rate, scored by the brightness.
EASY = {
    "sampling__num_inference_steps": 5,
    "model__lora_alpha": 32,
    "actor__lr": 0.02,
    "actor__ema_decay": 0.5,
    "rollout__prompts_per_step": 3,
    "rollout__n": 8,
    "rollout__micro_batch_size": 24,
    "trainer__steps": 10,
    "validation__every": 0,
}
# what the published settings need to fit in five denoising steps, and to show in ten trainer steps
FITTED: dict[str, dict[str, Any]] = {
    "flow_grpo_fast": {"sampling__window_size": 2, "sampling__window_range": "[0,4]"},
    "mix_grpo": {"sampling__window_size": 2, "sampling__window_every": 2},
    "mix_grpo_flash": {"sampling__window_size": 2, "sampling__window_every": 2},
    "tempflow_grpo": {"rollout__n": 2, "algorithm__branch_factor": 3},
    "branch_grpo": {"rollout__n": 1, "algorithm__split_steps": "[0,1,2]"},
    "dgpo": {"sampling__window_range": "[0,4]"},
}


@pytest.mark.parametrize("name", shipped("algorithm"))
def test_the_reward_follows_its_sign(name: str, train: Train, workplace: Path, tmp_path: Path) -> None:
    if name == "ddpo":
        pytest.skip("needs an epsilon-prediction pipeline: test_ddpo_on_stable_diffusion")
    keys = {**EASY, "validation__data": workplace / "val.txt", **FITTED.get(name, {})}
    change = {}
    for weight in (1, -1):
        run = train(tmp_path / str(weight), f"algorithm={name}", f"reward.scorers.bright.weight={weight}", **keys)
        bright = run.column("val/bright/mean")
        change[weight] = bright[-1] - bright[0]
        assert max(run.column("actor/ratio_deviation")) < 1e-5
    assert change[1] > 0.002 and change[-1] < -0.002, change
