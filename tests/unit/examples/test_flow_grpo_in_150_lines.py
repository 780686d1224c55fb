"""The example between README's program and a run: it learns, repeats to the bit, and stays on a page."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "flow_grpo_in_150_lines.py"


@pytest.fixture
def example() -> dict[str, Any]:
    """The names of the example, with two groups of four images."""
    names = runpy.run_path(str(EXAMPLE))
    shared = names["train"].__globals__
    shared.update(PROMPTS_PER_STEP=2, GROUP_SIZE=4, HELD_OUT=2)
    return shared


def test_it_fits_on_a_page() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 150


def test_two_runs_of_a_seed_have_the_same_lora(example: dict[str, Any], tmp_path: Path) -> None:
    ends = [example["train"](1, 3, tmp_path / name) for name in ("one", "two")]
    loras = [load_file(tmp_path / name / "pytorch_lora_weights.safetensors") for name in ("one", "two")]
    assert ends[0] == ends[1] and loras[0].keys() == loras[1].keys()
    assert all(torch.equal(loras[0][name], loras[1][name]) for name in loras[0])
    assert any(bool(values.any()) for name, values in loras[0].items() if "lora_B" in name)


def test_a_step_makes_better_images_likelier(example: dict[str, Any]) -> None:
    """After a step on one group, its objective with the ratio unclipped is above 0, its value on policy."""
    pipe, parameters = example["load_pipeline"]()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    tape, rewards = example["sample_group"](pipe, 'a red sign that reads "OPEN"', 1)
    rewards = torch.arange(len(rewards)).float()  # whatever is on them
    (advantages,) = example["advantages_of"]([rewards])
    example["add_gradient"](pipe, tape, advantages)
    optimizer.step()
    gains = list[float]()

    def measure(k: int, step: Any) -> None:
        ratio = (step.log_prob - step.recorded_log_prob).exp()
        gains.append(float((advantages * ratio).mean()))

    example["gerl"].replay(pipe, tape, measure, grad=False)
    assert len(gains) == 9 and sum(gains) > 0
