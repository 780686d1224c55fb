"""Which of the costly tests run: all with `GERL_DRILLS=all`, as in `.ci/run`; locally a sample of each kind.

Without it, tests marked `more` are skipped, one preset per family of algorithms is trained, and one pipeline of the zoo
per scheduler family and kind of guidance is checked.
"""

import os

import pytest

ALL = os.environ.get("GERL_DRILLS") == "all"
more = pytest.mark.skipif(not ALL, reason="with GERL_DRILLS=all")
PRESETS = ("flow_grpo", "branch_grpo", "dgpo", "diffusion_nft", "diffusion_dpo", "draft")
PIPELINES = (
    "StableDiffusionPipeline-text-to-image",  # noise prediction, CFG in one batch
    "StableDiffusionXLPipeline-text-to-image-(EDM,-Playground-2.5)",
    "StableDiffusion3Pipeline-text-to-image",  # flow matching, CFG in one batch
    "FluxPipeline-text-to-image",  # embedded guidance
    "QwenImagePipeline-text-to-image",  # two calls per step, normalised
    "LatentConsistencyModelPipeline-text-to-image",
    "FluxKontextPipeline-editing",
    "WanPipeline-text-to-video-(Wan-2.2,-two-experts)",
    "LTX2Pipeline-text-to-video-with-sound",
    "CogVideoXPipeline-text-to-video",  # velocity prediction
)


def sampled(name: str, local: tuple[str, ...]) -> bool:
    """Whether the case `name` runs: all cases in CI, those in `local` otherwise."""
    return ALL or name in local
