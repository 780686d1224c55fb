"""A quantised frozen base: fewer bytes, the same exactness, gradients close to those of the base as it was."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from training import chain_credit, relative

from gerl.algorithms import Batch, build_algorithm, count_pairs, row_credit
from gerl.algorithms.planning import plan_samples
from gerl.config import Config, ModelConfig, RolloutConfig, SamplingConfig, ValidationConfig, algorithm_config
from gerl.engine import record, replay
from gerl.errors import ConfigError, ModelError
from gerl.model.loading import load_pipeline, load_policy, weights_fingerprint
from gerl.model.policy import Policy
from gerl.model.quantization import check_quantisation, leading_values, outer_layers, stored_bytes, text_encoders
from gerl.protocol import Prompt
from gerl.workers.actor import Actor
from gerl.workers.rollout import Rollout

SIGNS: dict[str, Any] = {"height": 32, "width": 96, "guidance_scale": 1.0, "max_sequence_length": 1}
CALL = SIGNS | {"prompt": ['a red sign that reads "482"', 'a blue sign that reads "OPEN"'], "num_inference_steps": 5}
KINDS = ("int8", "fp8")


def policy_of(path: Path | str = "signs", device: str = "cpu", **keys: Any) -> Policy:
    policy = load_policy(ModelConfig(path=str(path), lora_rank=4, lora_alpha=4.0, **keys), 0.9, device, 0)
    torch.manual_seed(2)
    for name, p in policy.trained.items():
        if "lora_B" in name:
            p.data = (0.02 * torch.randn(p.shape)).to(p.device)
    return policy


def size(module: torch.nn.Module) -> int:
    return sum(stored_bytes(p) for name, p in module.named_parameters() if "lora_" not in name)


def gradients(policy: Policy, call: dict[str, Any] = CALL, **how: Any) -> tuple[dict[str, torch.Tensor], float]:
    """A policy loss's gradient by tensor of the LoRA, where there is one, and the largest |log ratio| on policy."""
    gens = [torch.Generator().manual_seed(i) for i in range(2)]
    _, tape = record(policy.pipe, call | {"output_type": "latent"}, noise_level=0.7, generators=gens, **how)
    found = []

    def on_step(k: int, step: Any) -> torch.Tensor:
        found.append(float((step.log_prob - step.recorded_log_prob).detach().abs().max()))
        return -(step.log_prob * torch.tensor([1.0, -1.0], device=step.log_prob.device)).mean()

    for p in policy.trained.values():
        p.grad = None
    replay(policy.pipe, tape, on_step)
    grads = {name: p.grad.cpu() for name, p in policy.trained.items() if p.grad is not None and p.grad.any()}
    assert grads and all(g.isfinite().all() for g in grads.values())
    return grads, max(found)


def apart(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """How far two gradients are apart, relative to the second; they are of the same tensors of the LoRA."""
    assert found.keys() == exact.keys()
    return relative(*(torch.cat([g[name].flatten() for name in exact]) for g in (found, exact)))


@pytest.fixture(scope="module")
def plain() -> Policy:
    return policy_of()


@pytest.mark.parametrize("kind", KINDS)
def test_signs_trains_on_a_quantised_base(kind: str, plain: Policy) -> None:
    policy = policy_of(quantize=kind)
    transformer, reference = policy.pipe.transformer, plain.pipe.transformer
    assert size(transformer.transformer_blocks) < 0.3 * size(reference.transformer_blocks)
    assert all(torch.equal(p, reference.get_parameter(n)) for n, p in transformer.named_parameters() if "proj_out" in n)
    assert {p.dtype for p in policy.trained.values()} == {torch.float32}
    assert size(policy.pipe.text_encoder) == size(plain.pipe.text_encoder)
    exact, _ = gradients(plain)
    found, deviation = gradients(policy)
    assert deviation == 0.0 and apart(found, exact) < (0.1 if kind == "int8" else 0.35)
    prints = [weights_fingerprint(p.denoisers) for p in (plain, policy, policy_of(quantize=kind))]
    assert prints[1] == prints[2] != prints[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_in_any_precision_and_with_checkpointing(plain: Policy, dtype: str, checkpointing: bool) -> None:
    found, deviation = gradients(policy_of(quantize="int8", dtype=dtype, gradient_checkpointing=checkpointing))
    assert deviation == 0.0 and apart(found, gradients(plain)[0]) < 0.2


@pytest.mark.parametrize("name", ["sd15", "flux", "qwen_image", "wan", "z_image"])
def test_tiny_pipelines_on_a_quantised_base(name: str, tmp_path: Path) -> None:
    case = tiny.CASES[name]
    tiny.build(case).save_pretrained(tmp_path)
    call = tiny.call_for(case, guided=False) | {"prompt": tiny.PROMPTS[:2]}
    policy = policy_of(tmp_path, quantize="int8", quantize_encoders="int8")
    found, deviation = gradients(policy, call, kernel=case.kernel)
    exact, without = gradients(policy_of(tmp_path), call, kernel=case.kernel)
    assert deviation == without == 0.0 and apart(found, exact) < 0.2
    denoiser = tiny.denoiser_of(policy.pipe)
    quantised = {n for n, p in denoiser.named_parameters() if type(p).__module__.startswith("torchao")}
    outer = outer_layers(denoiser)
    assert quantised and not any(n.startswith(f"{layer}.") for n in quantised for layer in outer)


def test_text_encoders_are_quantised_by_their_own_key(plain: Policy) -> None:
    pipe = load_pipeline(ModelConfig(quantize_encoders="int8"), "cpu")
    assert size(pipe.transformer) == size(plain.pipe.transformer)
    names = [name for name, c in pipe.components.items() if name.startswith("text_encoder") and c is not None]
    assert names and all(size(pipe.components[n]) < size(plain.pipe.components[n]) for n in names)
    images = [p(**CALL, output_type="np", generator=torch.Generator().manual_seed(0)).images
              for p in (pipe, plain.pipe)]  # fmt: skip
    assert abs(images[0] - images[1]).mean() < 0.1


def test_two_steps_of_training_raise_the_reward() -> None:
    """Darkness is what the images are rewarded for: what is drawn afterwards from the same noise is darker."""
    config = Config(
        model=ModelConfig(lora_rank=4, quantize="int8"),
        algorithm=algorithm_config("flow_grpo", clip_low=1.0, clip_high=1.0, clip_dimensions=None),
        sampling=SamplingConfig(height=32, width=96, num_inference_steps=4, guidance_scale=1.0,
                                noise_level=0.7, call={"max_sequence_length": 1}),
        rollout=RolloutConfig(prompts_per_step=1, n=8, micro_batch_size=8),
    )  # fmt: skip
    policy = load_policy(config.model, 0.0, "cpu", 0)
    algorithm = build_algorithm(config)
    actor = Actor(policy, config.actor, algorithm, total_updates=2)
    rollout = Rollout(policy, config.sampling, ValidationConfig())
    prompt, rewards = [Prompt(0, 'a red sign that reads "482"')], list[float]()
    for step in (1, 1, 1):  # the same noise again
        samples = plan_samples(config, prompt, step, 0)
        (task,) = algorithm.plan(samples)
        pixels, trajectory = rollout.generate(task, algorithm)
        reward = -torch.as_tensor(pixels).float().mean(dim=tuple(range(1, pixels.ndim)))
        rewards.append(float(reward.mean()))
        credit = chain_credit(((reward - reward.mean()) / reward.std()).tolist())
        pairs = count_pairs([(task, credit)])
        batches = [
            Batch(tape, [task.samples[i] for i in segment.leaves], segment.trained, row_credit(segment, credit), None)
            for segment, tape in zip(task.segments, trajectory.tapes, strict=True)
        ]
        stats = actor.accumulate(batches, pairs)
        assert stats.ratio_deviation == 0.0
        actor.step()
    assert rewards[0] < rewards[1] < rewards[2]


# --- what is refused


def test_a_missing_or_old_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(quantize="int8")
    check_quantisation(config, "cpu")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.9.1")
    with pytest.raises(ConfigError, match=r"model\.quantize=int8 needs the package torchao, 0\.16 or newer.*gerl\["):
        load_pipeline(config, "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"model\.quantize_encoders=nf4 .*gerl\[bitsandbytes\].*=none"):
        check_quantisation(ModelConfig(quantize_encoders="nf4"), "cpu")


def test_four_bits_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.50.2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match=r"model\.quantize=nf4 requires a GPU.*int8 or fp8"):
        check_quantisation(ModelConfig(quantize="nf4"), "cpu")


def test_nothing_is_merged_into_quantised_weights() -> None:
    with pytest.raises(ConfigError, match=r"model\.quantize=int8: .*model\.merge_lora=false"):
        ModelConfig(quantize="int8", lora="a/b", merge_lora=True)


def test_a_pipeline_that_cannot_be_quantised_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.build(tiny.CASES["sd3"]).save_pretrained(tmp_path)
    (tmp_path / "transformer" / "mine.py").write_text("")
    with pytest.raises(ModelError, match=r"has custom Python code.*model\.quantize=none"):
        load_pipeline(ModelConfig(path=str(tmp_path), quantize="int8"), "cpu")
    monkeypatch.setattr("gerl.model.quantization.text_encoders", lambda _: [])
    with pytest.raises(ModelError, match=r"model\.quantize_encoders=int8: .*no text encoder"):
        load_pipeline(ModelConfig(quantize_encoders="int8"), "cpu")


def test_values_of_quantised_weights_are_those_that_a_layer_uses() -> None:
    pipe = load_pipeline(ModelConfig(quantize="int8"), "cpu")
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    rows = layer(torch.eye(layer.in_features)) - (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(leading_values(layer.weight, 40), rows.T.flatten()[:40], rtol=1e-5, atol=1e-6)
    assert layer.weight.numel() <= stored_bytes(layer.weight) < 1.1 * layer.weight.numel()


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_a_gpu_trains_on_a_quantised_base(kind: str) -> None:
    pytest.importorskip("bitsandbytes" if kind == "nf4" else "torchao")
    plain, policy = (policy_of(device="cuda", quantize=q, quantize_encoders=q) for q in ("none", kind))
    blocks = [p.pipe.transformer.transformer_blocks for p in (policy, plain)]
    assert size(blocks[0]) < (0.4 if kind == "nf4" else 0.65) * size(blocks[1])  # of bfloat16
    exact, _ = gradients(plain)
    found, deviation = gradients(policy)
    assert deviation == 0.0 and apart(found, exact) < 0.6
    assert weights_fingerprint(policy.denoisers) != weights_fingerprint(plain.denoisers)


def test_encoders_are_found_by_library(tmp_path: Path) -> None:
    builders: dict[str, Callable[[], Any]] = {"sd3": tiny.CASES["sd3"].build}
    for name, build in builders.items():
        build().save_pretrained(tmp_path / name)
        assert text_encoders(str(tmp_path / name)) == ["text_encoder", "text_encoder_2", "text_encoder_3"]
