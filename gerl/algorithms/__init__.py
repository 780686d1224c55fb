"""The algorithms by their configuration: each a short file in terms of record, replay, kernels and `core_algos`."""

from gerl.algorithms.awm import AWM
from gerl.algorithms.base import Algorithm, Batch, KLWeight, Rewards, batches_of, count_pairs, row_credit
from gerl.algorithms.crd import CRD
from gerl.algorithms.dgpo import DGPO
from gerl.algorithms.diffusion_dpo import DiffusionDPO
from gerl.algorithms.diffusion_nft import DiffusionNFT
from gerl.algorithms.distillation import DMDR, OPD
from gerl.algorithms.fdfo import FDFO
from gerl.algorithms.flow_grpo import FlowDPPO, FlowGRPO, GRPOGuard
from gerl.algorithms.forward_process import SFT, BestOfN, ForwardProcess, RewardWeightedRegression, regularising
from gerl.algorithms.gradient_paths import (
    SRPO,
    DRaFT,
    DRaFTLV,
    DRTune,
    FlowBPBridge,
    FlowBPLagrange,
    FlowBPSparse,
    LeapAlign,
    MixedGradient,
    ReFL,
)
from gerl.algorithms.kto import KTO
from gerl.algorithms.neighbor_grpo import NeighborGRPO
from gerl.algorithms.policy_gradient import PolicyGradient
from gerl.algorithms.trees import BranchGRPO, DenseGRPO, TempFlowGRPO
from gerl.config import Config, algorithms
from gerl.config.algorithms import AlgorithmConfig

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
    algorithms.FlowGRPOConfig: FlowGRPO,
    algorithms.GRPOGuardConfig: GRPOGuard,
    algorithms.FlowDPPOConfig: FlowDPPO,
    algorithms.TempFlowGRPOConfig: TempFlowGRPO,
    algorithms.DenseGRPOConfig: DenseGRPO,
    algorithms.BranchGRPOConfig: BranchGRPO,
    algorithms.FDFOConfig: FDFO,
    algorithms.NeighborGRPOConfig: NeighborGRPO,
    algorithms.DiffusionNFTConfig: DiffusionNFT,
    algorithms.AWMConfig: AWM,
    algorithms.DGPOConfig: DGPO,
    algorithms.CRDConfig: CRD,
    algorithms.DiffusionDPOConfig: DiffusionDPO,
    algorithms.RWRConfig: RewardWeightedRegression,
    algorithms.BestOfNConfig: BestOfN,
    algorithms.OPDConfig: OPD,
    algorithms.DMDRConfig: DMDR,
    algorithms.SFTConfig: SFT,
    algorithms.KTOConfig: KTO,
    algorithms.ReFLConfig: ReFL,
    algorithms.DRaFTConfig: DRaFT,
    algorithms.DRaFTLVConfig: DRaFTLV,
    algorithms.DRTuneConfig: DRTune,
    algorithms.SRPOConfig: SRPO,
    algorithms.LeapAlignConfig: LeapAlign,
    algorithms.FlowBPSparseConfig: FlowBPSparse,
    algorithms.FlowBPBridgeConfig: FlowBPBridge,
    algorithms.FlowBPLagrangeConfig: FlowBPLagrange,
    algorithms.MixedGradientConfig: MixedGradient,
}


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of `config.algorithm.name`."""
    algorithm = ALGORITHMS[type(config.algorithm)](config)
    if config.data.regularise is not None:
        algorithm.regulariser = SFT(regularising(config))
    return algorithm
