"""The measurements before training: what a KL to the base model is worth in half precision."""

import pytest
import tiny
import torch
from training import config, new_policy

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.algorithms.signal_checks import probe_warnings
from gerl.engine import ReplayedStep
from gerl.engine.transitions import FlowRule
from gerl.protocol import Prompt
from gerl.workers.calibration import probe, rounded_otherwise
from gerl.workers.rollout import Rollout

PROMPT = [Prompt(0, "a red fox")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_roundings_differ_by_a_sixth_of_a_squared_unit(dtype: torch.dtype) -> None:
    output = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 3
    step = ReplayedStep(FlowRule(0.6, 0.4, 0.4, 0.3), output, None, None, None, output)
    moved = rounded_otherwise(step, dtype).model_output - output
    rounded = output.to(dtype).float()
    unit = torch.finfo(dtype).eps * 2 ** rounded.abs().log2().floor()  # the distance of two numbers of this size
    assert ((output - rounded).abs() <= unit * 0.501).all()
    assert float((moved / unit).square().mean()) == pytest.approx(1 / 6, rel=0.02)  # 2 of a variance of 1/12


@pytest.mark.parametrize(("dtype", "coef"), [(torch.float32, 0.1), (torch.bfloat16, 0.0), (torch.bfloat16, 0.1)])
def test_a_kl_below_the_precision_is_said_where_there_is_one(dtype: torch.dtype, coef: float) -> None:
    settings = config("flow_grpo", kl_coef=coef)
    policy = new_policy()
    policy.pipe.to(dtype)
    for p in policy.trained.values():
        p.data = p.data.float()
    algorithm, rollout = build_algorithm(settings), Rollout(policy, settings.sampling, settings.validation)
    (task,) = algorithm.plan(plan_samples(settings, PROMPT, 1, 0))
    trajectory = rollout.generate(task, algorithm)[1]
    found = probe(policy.pipe, trajectory, algorithm, tiny.denoiser_of(policy.pipe).dtype)
    said = [text for text in probe_warnings(found, None) if "algorithm.kl_coef" in text]
    if dtype == torch.float32 or not coef:
        assert found.kl_resolution is None and not said
    else:
        assert found.kl_resolution is not None and 1e-8 < found.kl_resolution < 1e-2
        assert len(said) == 1 and "model.dtype=float32" in said[0]
