"""GRPO-Guard (arXiv 2510.22319): a ratio whose mean and variance are the same at every step.

With log-probabilities averaged over dimensions the mean log-ratio is -KL / D < 0 and its spread differs from step to
step by an order of magnitude, so that the clip range rarely holds back samples with positive advantages. Guard adds the
missing KL and multiplies by the step's std: log ratio = mean(z (mu - mu_old)). Each step's loss is divided by |dt|
(`timestep_weights: inverse_dt`; `inverse_jacobian` is Precise's choice, arXiv 2605.23522).
"""

import torch

from gerl.algorithms.core_algos import guard_log_ratio
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.config.policy_gradients import GRPOGuardConfig
from gerl.engine import ReplayedStep
from gerl.engine.kernels import Rule


class GRPOGuard(FlowGRPO):
    """Flow-GRPO with the regulated ratio."""

    settings: GRPOGuardConfig
    scores_means = True

    def gain(self, rule: Rule) -> float:
        return rule.jacobian  # the ratio is multiplied by std

    def log_ratio(self, step: ReplayedStep) -> torch.Tensor:
        if self.settings.cfg == "off":  # see PolicyGradient.log_ratio
            old_log_prob, old_mean = step.log_prob.detach(), step.mean.detach()
        else:
            assert step.recorded_log_prob is not None and step.recorded_mean is not None
            old_log_prob, old_mean = step.recorded_log_prob, step.recorded_mean
        return guard_log_ratio(step.log_prob, old_log_prob, step.mean, old_mean, step.std)
