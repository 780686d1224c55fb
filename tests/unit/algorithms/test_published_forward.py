"""The presets that learn from noised images against what was published, number by number.

A preset that deviates without being listed fails, and so does a deviation that is listed but is none.
"""

import re
from typing import Any

import pytest
import yaml

from gerl.commandline.composition import compose_run
from gerl.commandline.experiments import config_folder
from gerl.config.changes import flat_settings, settings_of

Table = dict[str, tuple[Any, str]]  # key -> published value, where it stands

AWM = "scxue/advantage_weighted_matching advantage_weighted_matching/"
NFT = "NVlabs/DiffusionNFT "
CRD = "X-GenGroup/Flow-Factory "
DGPO = "Luo-Yihong/DGPO "
FLOW = "yifan123/flow_grpo "

PUBLISHED: dict[str, Table] = {
    "awm": {  # SD3.5-M, OCR, one node
        "algorithm.name": ("awm", "arXiv 2509.25050"),
        "algorithm.adv_estimator": ("grpo", AWM + "config/dgx_awm.py:225"),
        "algorithm.advantage_std": ("batch", AWM + "config/dgx_awm.py:211"),
        "algorithm.advantage_clip": (5.0, AWM + "config/base_awm.py:91"),
        "algorithm.weighting": ("ghuber", AWM + "config/dgx_awm.py:202"),
        "algorithm.off_policy": (False, AWM + "config/dgx_awm.py:208"),
        "algorithm.timesteps": (6, AWM + "config/dgx_awm.py:195"),
        "algorithm.timesteps_drawn": ("spread", AWM + "scripts/train_sd3_awm.py:1198"),
        "algorithm.clip_low": (1.0, AWM + "config/dgx_awm.py:226"),
        "algorithm.clip_high": (1.0, AWM + "config/dgx_awm.py:226"),
        "algorithm.kl_coef": (0.003, AWM + "config/dgx_awm.py:194"),
        "algorithm.old_kl_coef": (1.0, AWM + "config/dgx_awm.py:206"),
        "algorithm.old_decay": ([0, 0.0, 0.001, 0.3], AWM + "config/dgx_awm.py:205, scripts/train_sd3_awm.py:1413"),
        "algorithm.cfg": ("off", AWM + "config/base_awm.py:89"),
        "sampling.num_inference_steps": (14, AWM + "config/dgx_awm.py:176"),
        "sampling.window_range": ([1, 12], AWM + "config/dgx_awm.py:199,228"),
        "sampling.guidance_scale": (1.0, AWM + "config/dgx_awm.py:178"),
        "sampling.kernel": ("ode", AWM + "config/dgx_awm.py:188"),
        "sampling.solver": ("sa", AWM + "config/dgx_awm.py:210"),
        "sampling.sigmas": ("scheduler", AWM + "flow_grpo/diffusers_patch/sd3_pipeline_with_logprob.py:247"),
        "rollout.prompts_per_step": (72, AWM + "config/dgx_awm.py:182-185"),
        "rollout.n": (24, AWM + "config/dgx_awm.py:184"),
        "actor.updates_per_step": (1, AWM + "config/dgx_awm.py:191"),
        "actor.lr": (3e-4, AWM + "config/dgx_awm.py:201"),
        "actor.weight_decay": (1e-4, AWM + "config/base_awm.py:76"),
        "actor.betas": ([0.9, 0.999], AWM + "config/base_awm.py:72,74"),
        "actor.eps": (1e-8, AWM + "config/base_awm.py:78"),
        "actor.max_grad_norm": (1.0, AWM + "config/base_awm.py:83"),
        "actor.ema_decay": (0.99, AWM + "config/dgx_awm.py:231"),
    },
    "diffusion_nft": {  # SD3.5-M, GenEval and PickScore
        "algorithm.name": ("diffusion_nft", "arXiv 2509.16117"),
        "algorithm.adv_estimator": ("grpo", NFT + "config/base.py:106"),
        "algorithm.advantage_std": ("batch", NFT + "config/base.py:57"),
        "algorithm.advantage_clip": (5.0, NFT + "config/base.py:84"),
        "algorithm.mix": (1.0, NFT + "config/nft.py:61"),
        "algorithm.kl_coef": (1e-4, NFT + "config/nft.py:24"),
        "algorithm.timesteps": (9, NFT + "config/base.py:87, scripts/train_nft_sd3.py:569"),
        "algorithm.timesteps_drawn": ("sample", NFT + "scripts/train_nft_sd3.py:810"),
        "algorithm.old_decay": ([0, 0.0, 0.001, 0.5], NFT + "config/nft.py:60, scripts/train_nft_sd3.py:174-177"),
        "algorithm.rollout_decay": ([0, 0.0, 0.001, 0.5], NFT + "scripts/train_nft_sd3.py:1039"),
        "algorithm.cfg": ("off", NFT + "scripts/train_nft_sd3.py:888"),
        "sampling.num_inference_steps": (10, NFT + "config/nft.py:20"),
        "sampling.window_range": ([0, None], NFT + "scripts/train_nft_sd3.py:810"),
        "sampling.guidance_scale": (1.0, NFT + "config/nft.py:64"),
        "sampling.kernel": ("ode", NFT + "config/nft.py:65"),
        "sampling.solver": ("dpm2", NFT + "config/nft.py:66"),
        "sampling.sigmas": ("linear", NFT + "flow_grpo/diffusers_patch/pipeline_with_logprob.py:187"),
        "rollout.prompts_per_step": (48, NFT + "config/nft.py:29"),
        "rollout.n": (24, NFT + "config/nft.py:28"),
        "actor.updates_per_step": (1, NFT + "config/nft.py:89,104"),
        "actor.lr": (3e-4, NFT + "config/base.py:66"),
        "actor.weight_decay": (1e-4, NFT + "config/base.py:72"),
        "actor.betas": ([0.9, 0.999], NFT + "config/base.py:68,70"),
        "actor.eps": (1e-8, NFT + "config/base.py:74"),
        "actor.max_grad_norm": (1.0, NFT + "config/base.py:79"),
        "actor.ema_decay": (0.9, NFT + "scripts/train_nft_sd3.py:567"),
    },
    "crd": {  # SD3.5-M, OCR
        "algorithm.name": ("crd", "arXiv 2603.14128"),
        "algorithm.adv_estimator": ("grpo", CRD + "examples/crd/lora/sd3_5/default.yaml:44"),
        "algorithm.advantage_std": ("batch", CRD + "examples/crd/lora/sd3_5/default.yaml:83"),
        "algorithm.advantage_clip": (5.0, CRD + "examples/crd/lora/sd3_5/default.yaml:73"),
        "algorithm.mix": (1.0, CRD + "examples/crd/lora/sd3_5/default.yaml:47"),
        "algorithm.regression": ("squared", CRD + "src/flow_factory/hparams/training_args.py:834"),
        "algorithm.kl_coef": (0.1, CRD + "examples/crd/lora/sd3_5/default.yaml:67"),
        "algorithm.kl_by_reward": (True, CRD + "examples/crd/lora/sd3_5/default.yaml:69"),
        "algorithm.reference_guidance": (4.5, CRD + "examples/crd/lora/sd3_5/default.yaml:68"),
        "algorithm.timesteps": (20, CRD + "examples/crd/lora/sd3_5/default.yaml:60"),
        "algorithm.old_decay": ([0, 0.25, 0.005, 0.999], CRD + "examples/crd/lora/sd3_5/default.yaml:55"),
        "algorithm.rollout_decay": ([75, 0.0, 0.0075, 0.999], CRD + "examples/crd/lora/sd3_5/default.yaml:56"),
        "algorithm.cfg": ("off", CRD + "examples/crd/lora/sd3_5/default.yaml:78"),
        "sampling.num_inference_steps": (10, CRD + "examples/crd/lora/sd3_5/default.yaml:77"),
        "sampling.window_range": (None, CRD + "src/flow_factory/utils/noise_schedule.py:259"),
        "sampling.guidance_scale": (1.0, CRD + "examples/crd/lora/sd3_5/default.yaml:78"),
        "sampling.kernel": ("ode", CRD + "examples/crd/lora/sd3_5/default.yaml:103"),
        "sampling.solver": ("euler", CRD + "examples/crd/lora/sd3_5/default.yaml:103"),
        "sampling.sigmas": ("linear", CRD + "src/flow_factory/scheduler/flow_match_euler_discrete.py:57"),
        "rollout.prompts_per_step": (48, CRD + "examples/crd/lora/sd3_5/default.yaml:84"),
        "rollout.n": (24, CRD + "examples/crd/lora/sd3_5/default.yaml:82"),
        "actor.updates_per_step": (2, CRD + "examples/crd/lora/sd3_5/default.yaml:85"),
        "actor.lr": (3e-4, CRD + "examples/crd/lora/sd3_5/default.yaml:89"),
        "actor.weight_decay": (1e-4, CRD + "examples/crd/lora/sd3_5/default.yaml:90"),
        "actor.betas": ([0.9, 0.999], CRD + "examples/crd/lora/sd3_5/default.yaml:91"),
        "actor.eps": (1e-8, CRD + "examples/crd/lora/sd3_5/default.yaml:92"),
        "actor.max_grad_norm": (1.0, CRD + "examples/crd/lora/sd3_5/default.yaml:93"),
    },
    "dgpo": {  # SD3.5-M, OCR, recipe 1
        "algorithm.name": ("dgpo", "arXiv 2510.08425"),
        "algorithm.adv_estimator": ("grpo", DGPO + "config/dgpo.py:137"),
        "algorithm.advantage_std": ("batch", DGPO + "config/dgpo.py:124"),
        "algorithm.advantage_clip": (5.0, DGPO + "config/base.py:89"),
        "algorithm.timesteps": (4, DGPO + "config/dgpo.py:28"),
        "algorithm.timesteps_drawn": ("step", DGPO + "scripts/train_sd3_dgpo.py:67"),
        "algorithm.beta": (100.0, DGPO + "config/dgpo.py:32"),
        "algorithm.clip_low": (1e-2, DGPO + "config/dgpo.py:107"),
        "algorithm.clip_high": (1e-2, DGPO + "config/dgpo.py:107"),
        "algorithm.kl_coef": (0.02, DGPO + "config/dgpo.py:115"),
        "algorithm.reference": ("base", DGPO + "config/base.py:30"),
        "algorithm.reference_guidance": (None, DGPO + "config/base.py:29"),
        "algorithm.old_decay": ([0, 0.0, 0.001, 0.3], DGPO + "scripts/train_sd3_dgpo.py:1176"),
        "algorithm.rollout_old_after": (200, DGPO + "config/dgpo.py:31"),
        "algorithm.cfg": ("off", DGPO + "scripts/train_sd3_dgpo.py:1120"),
        "sampling.num_inference_steps": (10, DGPO + "config/dgpo.py:103"),
        "sampling.window_range": ([0, 7], DGPO + "config/dgpo.py:29, scripts/train_sd3_dgpo.py:1063"),
        "sampling.guidance_scale": (4.5, DGPO + "config/dgpo.py:105"),
        "sampling.kernel": ("ode", DGPO + "config/dgpo.py:122"),
        "sampling.solver": ("dpm2", DGPO + "config/dgpo.py:24"),
        "rollout.prompts_per_step": (8, DGPO + "config/dgpo.py:111"),
        "rollout.n": (16, DGPO + "config/dgpo.py:110"),
        "actor.updates_per_step": (1, DGPO + "config/dgpo.py:119"),
        "actor.lr": (3e-4, DGPO + "config/base.py:68"),
        "actor.weight_decay": (1e-4, DGPO + "config/base.py:74"),
        "actor.max_grad_norm": (1.0, DGPO + "config/base.py:81"),
        "actor.ema_decay": ("0.9 every 8 steps", DGPO + "scripts/train_sd3_dgpo.py:627"),
    },
    "diffusion_dpo": {  # SD3.5-M, GenEval
        "algorithm.name": ("diffusion_dpo", "arXiv 2311.12908"),
        "algorithm.beta": (100.0, FLOW + "config/dpo.py:53"),
        "algorithm.old_every": (40, FLOW + "config/dpo.py:47"),
        "algorithm.old_decay": ([0, 0.0, 0.0, 0.0], FLOW + "scripts/train_sd3_dpo.py:614"),
        "algorithm.timesteps": (1, FLOW + "scripts/train_sd3_dpo.py:890"),
        "sampling.num_inference_steps": (40, FLOW + "config/dpo.py:36"),
        "sampling.guidance_scale": (4.5, FLOW + "config/dpo.py:38"),
        "sampling.kernel": ("flow_sde", FLOW + "config/base.py:54"),
        "rollout.n": (24, FLOW + "config/dpo.py:42"),
        "actor.updates_per_step": (1, FLOW + "config/dpo.py:50"),
        "actor.lr": (3e-4, FLOW + "config/base.py:63"),
        "actor.weight_decay": (1e-4, FLOW + "config/base.py:69"),
        "actor.max_grad_norm": (1.0, FLOW + "config/base.py:76"),
        "actor.ema_decay": ("0.9 every 8 steps", FLOW + "scripts/train_sd3_dpo.py:422"),
    },
    "best_of_n": {  # SD3.5-M, GenEval
        "algorithm.name": ("best_of_n", "arXiv 2304.06767"),
        "algorithm.timesteps": (1, FLOW + "scripts/train_sd3_sft.py:812"),
        "sampling.num_inference_steps": (40, FLOW + "config/sft.py:36"),
        "sampling.guidance_scale": (4.5, FLOW + "config/sft.py:38"),
        "sampling.kernel": ("flow_sde", FLOW + "config/base.py:54"),
        "rollout.n": (24, FLOW + "config/sft.py:42"),
        "actor.updates_per_step": (1, FLOW + "config/sft.py:50"),
        "actor.lr": (3e-4, FLOW + "config/base.py:63"),
        "actor.weight_decay": (1e-4, FLOW + "config/base.py:69"),
        "actor.max_grad_norm": (1.0, FLOW + "config/base.py:76"),
        "actor.ema_decay": ("0.9 every 8 steps", FLOW + "scripts/train_sd3_sft.py:424"),
    },
}

FIVE = "advantages are divided by 5 there: 5 times everything else is the same update"
SMALL = "a step that a small machine can take; the recipes have the published one"
GUIDANCE = "null is the pipeline's own: models that were distilled to take guidance need theirs; the recipes set it"
ALL_LEVELS = "each level of the range once: less variance for as many denoiser runs as the rollout"
ODE = "the images are wanted, not the noise: deterministic sampling draws better ones in a quarter of the steps"
EVERY_STEP = "0.9 of every eighth step there; these weights are for validation only, and gerl's runs are shorter"
PER_STEP = "its decays count optimizer steps, two a trainer step; gerl's count trainer steps"
DEVIATIONS: dict[str, Table] = {
    "awm": {
        "algorithm.kl_coef": (0.015, FIVE),
        "algorithm.old_kl_coef": (5.0, FIVE),
        "actor.max_grad_norm": (5.0, FIVE),
        "actor.eps": (5e-8, FIVE),
        "sampling.solver": (
            "dpm2",
            "gerl's second-order solver; the SA-Solver without noise is one of second order too",
        ),
        "sampling.sigmas": (
            "linear",
            "second order gains nothing on the scheduler's own sigmas, which jump at the end",
        ),
        "sampling.guidance_scale": (None, GUIDANCE),
        "rollout.prompts_per_step": (8, SMALL),
        "rollout.n": (12, SMALL),
    },
    "diffusion_nft": {
        "sampling.guidance_scale": (None, GUIDANCE),
        "rollout.prompts_per_step": (8, SMALL),
        "rollout.n": (12, SMALL),
    },
    "crd": {
        "algorithm.timesteps": (None, "20 draws from the nine levels, with new noise each; gerl trains each once"),
        "algorithm.old_decay": ([0, 0.25, 0.01, 0.999], PER_STEP),
        "algorithm.rollout_decay": ([37.5, 0.0, 0.015, 0.999], PER_STEP),
        "rollout.prompts_per_step": (8, SMALL),
        "rollout.n": (12, SMALL),
    },
    "dgpo": {
        "sampling.guidance_scale": (None, GUIDANCE),
        "actor.ema_decay": (0.9, EVERY_STEP),
        "rollout.n": (12, SMALL),
    },
    "diffusion_dpo": {
        "algorithm.timesteps": (None, ALL_LEVELS),
        "sampling.num_inference_steps": (10, ODE),
        "sampling.kernel": ("ode", ODE),
        "sampling.guidance_scale": (None, GUIDANCE),
        "actor.ema_decay": (0.9, EVERY_STEP),
        "rollout.n": (12, SMALL),
    },
    "best_of_n": {
        "algorithm.timesteps": (None, ALL_LEVELS),
        "sampling.num_inference_steps": (10, ODE),
        "sampling.kernel": ("ode", ODE),
        "sampling.guidance_scale": (None, GUIDANCE),
        "actor.ema_decay": (0.9, EVERY_STEP),
        "rollout.n": (12, SMALL),
    },
}
# where nothing was published that a number could be compared with
OWN = {"diffusion_dpo": ("sampling.solver", "sampling.sigmas"), "best_of_n": ("sampling.solver", "sampling.sigmas")}
OWN |= {"dgpo": ("sampling.sigmas",)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_as_published_but_for_what_is_listed(name: str) -> None:
    found = flat_settings(settings_of(compose_run(["experiment=plain", f"algorithm={name}"]).config))
    deviations = DEVIATIONS[name]
    assert set(deviations) <= set(PUBLISHED[name])
    for key, (value, source) in PUBLISHED[name].items():
        ours, reason = deviations.get(key, (value, ""))
        assert found[key] == ours, f"{key}: {value} in {source}"
        assert not reason or ours != value, f"{key} is listed as a deviation, but is as in {source}"


def lines_of(name: str) -> list[str]:
    """The lines of a preset that set a key of a block."""
    text = (config_folder() / "algorithm" / f"{name}.yaml").read_text()
    return [line for line in text.splitlines() if re.match(r"  \w+:", line) and not line.startswith("  name:")]


@pytest.mark.parametrize("name", [*PUBLISHED, "awm_fast", "rwr"])
def test_every_setting_of_a_preset_says_where_it_is_from(name: str) -> None:
    lines = lines_of(name)
    assert len(lines) > 3
    assert not [line for line in lines if not re.search(r" # (gerl: .|\[1\] [\w./]+:\d)", line)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_has_every_setting_of_a_preset(name: str) -> None:
    blocks = yaml.safe_load((config_folder() / "algorithm" / f"{name}.yaml").read_text())
    keys = {f"{block}.{key}" for block, values in blocks.items() for key in values}
    assert keys - set(PUBLISHED[name]) == set(OWN.get(name, ()))


def test_citations_have_a_file_and_a_line() -> None:
    for table in PUBLISHED.values():
        for key, (_, source) in table.items():
            assert source.startswith("arXiv ") or re.search(r"^\S+/\S+ \S+:\d", source), (key, source)
