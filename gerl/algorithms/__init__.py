"""The algorithms by their configuration: each a short file in terms of record, replay, kernels and `core_algos`."""

from gerl.algorithms.awm import AWM
from gerl.algorithms.base import Algorithm, Batch, Rewards, count_pairs, row_credit
from gerl.algorithms.branch_grpo import BranchGRPO
from gerl.algorithms.crd import CRD
from gerl.algorithms.dense_grpo import DenseGRPO
from gerl.algorithms.dgpo import DGPO
from gerl.algorithms.diffusion_dpo import DiffusionDPO
from gerl.algorithms.diffusion_nft import DiffusionNFT
from gerl.algorithms.flow_dppo import FlowDPPO
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.algorithms.forward_process import ForwardProcess
from gerl.algorithms.grpo_guard import GRPOGuard
from gerl.algorithms.neighbor_grpo import NeighborGRPO
from gerl.algorithms.policy_gradient import PolicyGradient
from gerl.algorithms.regression import BestOfN, RewardWeightedRegression
from gerl.algorithms.tempflow_grpo import TempFlowGRPO
from gerl.config import Config
from gerl.config import algorithm as configs

__all__ = ["ALGORITHMS", "Algorithm", "Batch", "ForwardProcess", "PolicyGradient", "Rewards", "build_algorithm",
           "count_pairs", "row_credit"]  # fmt: skip

ALGORITHMS: dict[type[configs.AlgorithmConfig], type[Algorithm]] = {
    configs.FlowGRPOConfig: FlowGRPO,
    configs.GRPOGuardConfig: GRPOGuard,
    configs.FlowDPPOConfig: FlowDPPO,
    configs.TempFlowGRPOConfig: TempFlowGRPO,
    configs.DenseGRPOConfig: DenseGRPO,
    configs.BranchGRPOConfig: BranchGRPO,
    configs.NeighborGRPOConfig: NeighborGRPO,
    configs.DiffusionNFTConfig: DiffusionNFT,
    configs.AWMConfig: AWM,
    configs.DGPOConfig: DGPO,
    configs.CRDConfig: CRD,
    configs.DiffusionDPOConfig: DiffusionDPO,
    configs.RWRConfig: RewardWeightedRegression,
    configs.BestOfNConfig: BestOfN,
}


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of `config.algorithm.name`."""
    return ALGORITHMS[type(config.algorithm)](config)
