"""One of the two experts of a denoising is trained, the other frozen (Wan 2.2), by a LoRA or by its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from newer import needs
from safetensors.torch import load_file
from zoo.video import wan_2_2

import gerl
from gerl.config import ModelConfig
from gerl.engine import record, replay
from gerl.errors import ModelError
from gerl.model.loading import load_policy
from gerl.model.lora import targets_of, with_lora
from gerl.model.shards import TORCH
from gerl.trainer.main_flowgrpo import main

CALL = {"prompt": ["a red fox", "blue"], "height": 16, "width": 16, "num_inference_steps": 4, "output_type": "np"}
CALL |= {"guidance_scale": 1.0, "num_frames": 5, "max_sequence_length": 16}
SETTINGS = ["sampling.call={num_frames: 5, max_sequence_length: 16}", "checkpoint.every=1", "actor.lr=0.01"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first expert takes the first of four steps, the second one the others."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("experts") / "wan"
    wan_2_2().save_pretrained(folder)
    return folder


def test_both_are_seen_by_one_expression(experts: Path) -> None:
    denoisers = {n: getattr(DiffusionPipeline.from_pretrained(experts), n) for n in ("transformer", "transformer_2")}
    layers = {name: len(found) for name, found in targets_of(denoisers, "attn1").items()}
    assert layers["transformer"] == layers["transformer_2"] > 0
    assert targets_of(denoisers, r"attn1\.to_q$").keys() == denoisers.keys()
    assert targets_of(denoisers, r"^transformer_2\..*to_q$").keys() == {"transformer_2"}
    assert targets_of(denoisers, r"^(?!transformer_2\.).*to_q$").keys() == {"transformer"}
    assert targets_of(denoisers, r"^transformer\.blocks\.0\..*attn1\.to_q$") == {"transformer": ["blocks.0.attn1.to_q"]}
    # no name begins so with the denoiser: names without it
    found = targets_of(denoisers, r"^blocks\.1\.attn1\.to_q$")
    assert found == {name: ["blocks.1.attn1.to_q"] for name in denoisers}
    with pytest.raises(ModelError, match=r"to_z.* WanTransformer3DModel and WanTransformer3DModel; .* transformer\."):
        targets_of(denoisers, "to_z")


def test_the_steps_of_the_frozen_expert_have_no_part_in_the_gradient(experts: Path) -> None:
    policy = load_policy(ModelConfig(path=str(experts), lora_targets=r"^transformer_2\."), 0.9, "cpu", 0)
    assert with_lora(policy.denoisers).keys() == {"transformer_2"} and policy.denoisers.keys() > {"transformer_2"}
    assert all(name.startswith("transformer_2.") for name in policy.trained)
    torch.manual_seed(0)
    for p in policy.trained.values():
        p.data.normal_(0, 0.1)
    _, tape = record(policy.pipe, CALL, noise_level=0.7, window=[0, 1, 2])
    seen, gradients = list[int](), []
    for steps in (None, [1, 2]):
        for p in policy.trained.values():
            p.grad = None

        def on_step(k: int, step: Any) -> torch.Tensor:
            seen.append(k)
            return step.log_prob.sum()

        replay(policy.pipe, tape, on_step, steps=steps)
        gradients.append({name: p.grad for name, p in policy.trained.items()})
    assert seen == [1, 2, 1, 2] and gradients[0]
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    assert not any(p.grad is not None for p in policy.pipe.transformer.parameters())


@pytest.mark.parametrize("algorithm", ["flow_grpo", "awm"])
def test_a_lora_on_one_expert_is_trained_saved_and_loaded(
    train: Callable[..., Any], experts: Path, tmp_path: Path, algorithm: str
) -> None:
    keys = [*SETTINGS, f"algorithm={algorithm}", r"model.lora_targets='^transformer_2\.'", f"model.path={experts}"]
    keys += ["sampling.window_range=[0,3]", "sampling.num_inference_steps=4", "sampling.sigmas=scheduler"]
    run = train(tmp_path / "run", *keys)
    weights = load_file(run.checkpoint(2) / "lora" / "pytorch_lora_weights.safetensors")
    assert weights and all(name.startswith("transformer_2.") for name in weights)
    assert not torch.equal(run.lora(1), run.lora(2)) and "no LoRA" in (run.folder / "log.txt").read_text()
    again = train(tmp_path / "again", *keys, "trainer.steps=1")
    assert main([f"checkpoint.resume={again.folder}", "trainer.steps=2"]) == 0
    assert torch.equal(again.lora(2), run.lora(2))
    assert gerl.export(run.folder, tmp_path / "out", "diffusers")


def test_a_window_of_the_frozen_expert_alone_is_warned_of(
    train: Callable[..., Any], experts: Path, tmp_path: Path
) -> None:
    keys = [*SETTINGS, r"model.lora_targets='^transformer_2\.'", f"model.path={experts}", "sampling.window_range=[0,1]"]
    run = train(tmp_path / "run", *keys)
    assert torch.equal(run.lora(1), run.lora(2))
    assert (run.folder / "log.txt").read_text().count("those of transformer, which is not trained") == 1


@needs("torch", TORCH, "writes no checkpoint of all weights")
def test_the_weights_of_one_expert_are_trained(train: Callable[..., Any], experts: Path, tmp_path: Path) -> None:
    keys = [*SETTINGS, "algorithm=flow_grpo", r"model.train='^transformer_2\..*attn1'", f"model.path={experts}"]
    run = train(tmp_path / "run", *keys, "trainer.steps=1")
    before, after = (
        {name: load_file(next((folder / name).glob("*.safetensors"))) for name in ("transformer", "transformer_2")}
        for folder in (experts, run.checkpoint(1))
    )
    changed = {n: [k for k, v in before[n].items() if not torch.equal(v, after[n][k])] for n in before}
    assert changed["transformer"] == [] and changed["transformer_2"]
    assert all("attn1" in name for name in changed["transformer_2"])
