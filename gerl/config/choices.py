"""The choices that keys offer, each listed once: what treats them one by one imports its list from here."""

from typing import Literal

KernelName = Literal["ode", "flow_sde", "dance_sde", "cps", "precise", "dance_precise", "ddim"]
SolverName = Literal["euler", "dpm2"]
FeatureCacheName = Literal["none", "first_block", "taylorseer"]
SigmaSpacing = Literal["scheduler", "linear"]
WindowSchedule = Literal["random", "geometric", "progressive", "decay"]
WindowScope = Literal["step", "group"]

CfgMode = Literal["joint", "detach_uncond", "off"]
AdvantageEstimator = Literal["grpo", "rloo", "reinforce_pp", "gdpo"]
StdKind = Literal["group", "batch", "none"]
NodeStdKind = Literal["depth", "leaves"]
StepDistance = Literal["gaussian", "mean", "velocity"]
KLKind = Literal["gaussian", "flow_grpo", "velocity", "k1", "k2", "k3"]
StepWeighting = Literal["uniform", "std", "inverse_dt", "inverse_jacobian", "pcpo", "std2_over_jacobian"]
StepLikelihood = Literal["gaussian", "squared_error"]
LikelihoodWeighting = Literal["uniform", "t", "t2", "huber", "ghuber"]
DiversityShaping = Literal["none", "scale", "add"]
LevelDraw = Literal["spread", "step", "sample"]

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Offload = Literal["none", "encoders", "blocks"]
Quantisation = Literal["none", "int8", "fp8", "nf4"]
DrawingPrecision = Literal["none", "int8", "fp8"]
Optimizer = Literal["adamw", "adamw8bit"]
LrSchedule = Literal["constant", "linear", "cosine"]
RewardNormalisation = Literal["none", "group", "batch", "rank"]
RunPart = Literal["training", "validation"]  # of which a scorer looks at the images
RunParts = Literal["both", "training", "validation"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]
Overlong = Literal["truncate", "drop", "error"]  # what becomes of prompts that no tokenizer reads to their end
TrainedImages = Literal["drawn", "files"]  # what the algorithm learns from
