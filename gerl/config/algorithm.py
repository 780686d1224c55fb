"""The block `algorithm`: a class for each algorithm with the keys that it reads, their defaults, and facts about it.

`algorithm.name` says which class it is; presets that differ only in how they sample share one. A key that several
algorithms read stands in a class that they inherit from. What an algorithm does is in `gerl/algorithms`.
"""

from typing import Annotated, Any, cast, get_args

from pydantic import Field

from gerl.config.algorithm_keys import AlgorithmConfig
from gerl.config.distillation import DMDRConfig, OPDConfig
from gerl.config.noised_images import (
    AWMConfig,
    BestOfNConfig,
    CRDConfig,
    DGPOConfig,
    DiffusionDPOConfig,
    DiffusionNFTConfig,
    KTOConfig,
    RWRConfig,
    SFTConfig,
)
from gerl.config.policy_gradients import (
    BranchGRPOConfig,
    DenseGRPOConfig,
    FDFOConfig,
    FlowDPPOConfig,
    FlowGRPOConfig,
    GRPOGuardConfig,
    NeighborGRPOConfig,
    TempFlowGRPOConfig,
)
from gerl.config.reward_gradients import (
    DRaFTConfig,
    DRaFTLVConfig,
    DRTuneConfig,
    FlowBPBridgeConfig,
    FlowBPLagrangeConfig,
    FlowBPSparseConfig,
    LeapAlignConfig,
    MixedGradientConfig,
    ReFLConfig,
    SRPOConfig,
)

AnyAlgorithm = Annotated[
    FlowGRPOConfig | GRPOGuardConfig | FlowDPPOConfig | TempFlowGRPOConfig | DenseGRPOConfig | BranchGRPOConfig
    | FDFOConfig | NeighborGRPOConfig | DiffusionNFTConfig | AWMConfig | DGPOConfig | CRDConfig | DiffusionDPOConfig
    | OPDConfig | DMDRConfig | SFTConfig | KTOConfig
    | ReFLConfig | DRaFTConfig | DRaFTLVConfig | DRTuneConfig | SRPOConfig | LeapAlignConfig | FlowBPSparseConfig
    | FlowBPBridgeConfig | FlowBPLagrangeConfig | MixedGradientConfig
    | RWRConfig | BestOfNConfig,
    Field(discriminator="name"),
]  # fmt: skip
BY_NAME: dict[str, type[AlgorithmConfig]] = {
    name: cls for cls in get_args(get_args(AnyAlgorithm)[0]) for name in cls.names()
}


def algorithm_config(name: str = "flow_grpo", **keys: Any) -> AnyAlgorithm:
    """The configuration of the algorithm `name` with `keys`; raises `KeyError` on a name that there is not."""
    return cast(AnyAlgorithm, BY_NAME[name](name, **keys))
