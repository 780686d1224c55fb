"""How trained steps count: the factor of the drawn noise in the gradient, and the gradient of each step alone."""

from collections.abc import Callable, Sequence

import pytest
import torch
from training import Training, chain_credit, config, relative

from gerl.algorithms import PolicyGradient, build_algorithm, count_pairs
from gerl.engine import ReplayedStep
from gerl.engine.replay import StepGradients, squared_norm
from gerl.engine.transitions import FlowRule, coefficients, gaussian_log_prob
from gerl.workers.actor import flat_copy

ADVANTAGES = [1.0, -0.5, 2.0, -1.5, 0.5, 0.7, -1.0, 0.3]


@pytest.mark.parametrize("kernel", ["flow_sde", "cps", "precise"])
@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard", "flow_dppo"])
def test_the_gain_is_the_factor_of_the_noise_in_the_gradient_of_the_ratio(name: str, kernel: str) -> None:
    algorithm = build_algorithm(config(name, sampling_kernel=kernel))
    assert isinstance(algorithm, PolicyGradient)
    rule = FlowRule(0.7, 0.5, *coefficients(kernel, 0.7, 0.5, 0.7, 0.9))
    torch.manual_seed(0)
    x, output, noise = (torch.randn(3, 5, 2) for _ in range(3))
    output.requires_grad_()
    mean = rule.mean(x, output).detach()
    x_next = mean + rule.std * noise
    recorded = gaussian_log_prob(x_next, mean, rule.std)
    step = ReplayedStep(rule, x, x_next, recorded, mean, output)
    algorithm.log_ratio(step).sum().backward()
    assert output.grad is not None
    factor = output.grad * noise[0].numel() / noise  # of the mean over a sample's values
    assert factor.abs() == pytest.approx(torch.full_like(factor, algorithm.gain(rule)), rel=1e-3)


@pytest.mark.parametrize("weights", ["uniform", "std2_over_jacobian"])
def test_the_facts_of_a_step_are_those_of_its_rule_and_weight(weights: str) -> None:
    training = Training(config("flow_grpo", timestep_weights=weights))
    ((_, _, (tape,)),) = training.tasks
    facts = training.algorithm.step_facts(tape, (0, 2))
    assert [f.step for f in facts] == [0, 2]
    for f in facts:
        rule = tape.steps[f.step].rule
        assert (f.sigma, f.dt, f.std, f.jacobian) == (rule.sigma, rule.dt, rule.std, rule.jacobian)
        weight = 1.0 if weights == "uniform" else rule.std**2 / rule.jacobian
        assert (f.weight or 0) / weight == pytest.approx((facts[0].weight or 0) / (1.0 if weights == "uniform" else
            tape.steps[0].rule.std ** 2 / tape.steps[0].rule.jacobian))  # fmt: skip
        assert f.gain == pytest.approx((f.weight or 0) * rule.jacobian / rule.std)


@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft", "crd"])
def test_what_a_step_adds_to_a_gradient_is_found_without_changing_it(name: str) -> None:
    training = Training(config(name))
    credit = chain_credit(ADVANTAGES)
    whole, _ = training.gradient(credit)
    ((task, _, tapes),) = training.tasks
    (batch,) = training.batches(task, tapes, credit)
    (rows,) = training.algorithm.micro_batches(batch)
    pairs, parameters = count_pairs([(task, credit)]), training.actor.parameters

    def measured(reduce: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> dict[int, torch.Tensor]:
        meter = StepGradients(parameters, reduce)
        training.algorithm.train(training.policy, batch, rows, pairs, meter)
        return meter.end()

    vectors, squares = measured(flat_copy), measured(squared_norm)  # on top of the gradient that is there
    assert relative(training.actor.flat_gradient(), 3 * whole) < 1e-6
    assert list(vectors) == list(batch.trained) == [0, 1, 2]
    assert relative(torch.stack(list(vectors.values())).sum(0), whole) < 1e-5
    for k, square in squares.items():
        assert float(square) == pytest.approx(float(vectors[k].norm()) ** 2, rel=1e-3)
