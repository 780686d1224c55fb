"""The algorithms by their configuration: each a short file in terms of record, replay, kernels and `core_algos`."""

from gerl.algorithms.awm import AWM
from gerl.algorithms.base import Algorithm, Batch, KLWeight, Rewards, batches_of, count_pairs, row_credit
from gerl.algorithms.branch_grpo import BranchGRPO
from gerl.algorithms.crd import CRD
from gerl.algorithms.dense_grpo import DenseGRPO
from gerl.algorithms.dgpo import DGPO
from gerl.algorithms.diffusion_dpo import DiffusionDPO
from gerl.algorithms.diffusion_nft import DiffusionNFT
from gerl.algorithms.dmdr import DMDR
from gerl.algorithms.fdfo import FDFO
from gerl.algorithms.flow_dppo import FlowDPPO
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.algorithms.forward_process import ForwardProcess
from gerl.algorithms.gradient_paths import (
    DRaFT,
    DRaFTLV,
    DRTune,
    FlowBPBridge,
    FlowBPLagrange,
    FlowBPSparse,
    LeapAlign,
    ReFL,
)
from gerl.algorithms.grpo_guard import GRPOGuard
from gerl.algorithms.kto import KTO
from gerl.algorithms.mixed_gradient import MixedGradient
from gerl.algorithms.neighbor_grpo import NeighborGRPO
from gerl.algorithms.opd import OPD
from gerl.algorithms.policy_gradient import PolicyGradient
from gerl.algorithms.regression import SFT, BestOfN, RewardWeightedRegression, regularising
from gerl.algorithms.srpo import SRPO
from gerl.algorithms.tempflow_grpo import TempFlowGRPO
from gerl.config import Config, distillation, noised_images, policy_gradients, reward_gradients
from gerl.config.algorithm_keys import AlgorithmConfig

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Batch",
    "ForwardProcess",
    "KLWeight",
    "PolicyGradient",
    "Rewards",
    "batches_of",
    "build_algorithm",
    "count_pairs",
    "row_credit",
]  # fmt: skip

ALGORITHMS: dict[type[AlgorithmConfig], type[Algorithm]] = {
    policy_gradients.FlowGRPOConfig: FlowGRPO,
    policy_gradients.GRPOGuardConfig: GRPOGuard,
    policy_gradients.FlowDPPOConfig: FlowDPPO,
    policy_gradients.TempFlowGRPOConfig: TempFlowGRPO,
    policy_gradients.DenseGRPOConfig: DenseGRPO,
    policy_gradients.BranchGRPOConfig: BranchGRPO,
    policy_gradients.FDFOConfig: FDFO,
    policy_gradients.NeighborGRPOConfig: NeighborGRPO,
    noised_images.DiffusionNFTConfig: DiffusionNFT,
    noised_images.AWMConfig: AWM,
    noised_images.DGPOConfig: DGPO,
    noised_images.CRDConfig: CRD,
    noised_images.DiffusionDPOConfig: DiffusionDPO,
    noised_images.RWRConfig: RewardWeightedRegression,
    noised_images.BestOfNConfig: BestOfN,
    distillation.OPDConfig: OPD,
    distillation.DMDRConfig: DMDR,
    noised_images.SFTConfig: SFT,
    noised_images.KTOConfig: KTO,
    reward_gradients.ReFLConfig: ReFL,
    reward_gradients.DRaFTConfig: DRaFT,
    reward_gradients.DRaFTLVConfig: DRaFTLV,
    reward_gradients.DRTuneConfig: DRTune,
    reward_gradients.SRPOConfig: SRPO,
    reward_gradients.LeapAlignConfig: LeapAlign,
    reward_gradients.FlowBPSparseConfig: FlowBPSparse,
    reward_gradients.FlowBPBridgeConfig: FlowBPBridge,
    reward_gradients.FlowBPLagrangeConfig: FlowBPLagrange,
    reward_gradients.MixedGradientConfig: MixedGradient,
}


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of `config.algorithm.name`."""
    algorithm = ALGORITHMS[type(config.algorithm)](config)
    if config.data.regularise is not None:
        algorithm.regulariser = SFT(regularising(config))
    return algorithm
