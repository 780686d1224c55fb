"""The algorithms by name. One is one short file in terms of record, replay, kernels and `core_algos`."""

from gerl.algorithms.awm import AWM
from gerl.algorithms.base import Algorithm, Batch, Rewards, count_pairs, row_credit
from gerl.algorithms.branch_grpo import BranchGRPO
from gerl.algorithms.crd import CRD
from gerl.algorithms.dgpo import DGPO
from gerl.algorithms.diffusion_dpo import DiffusionDPO
from gerl.algorithms.diffusion_nft import DiffusionNFT
from gerl.algorithms.flow_dppo import FlowDPPO
from gerl.algorithms.forward_process import ForwardProcess
from gerl.algorithms.grpo_guard import GRPOGuard
from gerl.algorithms.policy_gradient import PolicyGradient
from gerl.algorithms.regression import BestOfN, RewardWeightedRegression
from gerl.algorithms.tempflow_grpo import TempFlowGRPO
from gerl.config import Config

__all__ = ["ALGORITHMS", "Algorithm", "Batch", "ForwardProcess", "PolicyGradient", "Rewards", "build_algorithm",
           "count_pairs", "row_credit"]  # fmt: skip

# those that share a class differ in how they sample: see configs/algorithm
ALGORITHMS: dict[str, type[Algorithm]] = {
    "flow_grpo": PolicyGradient,
    "flow_grpo_fast": PolicyGradient,
    "dance_grpo": PolicyGradient,
    "mix_grpo": PolicyGradient,
    "ddpo": PolicyGradient,
    "grpo_guard": GRPOGuard,
    "flow_dppo": FlowDPPO,
    "tempflow_grpo": TempFlowGRPO,
    "branch_grpo": BranchGRPO,
    "diffusion_nft": DiffusionNFT,
    "awm": AWM,
    "dgpo": DGPO,
    "crd": CRD,
    "diffusion_dpo": DiffusionDPO,
    "rwr": RewardWeightedRegression,
    "best_of_n": BestOfN,
}


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of `config.algorithm.name`."""
    return ALGORITHMS[config.algorithm.name](config)
