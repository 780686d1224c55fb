"""What the official sources of the policy gradients set, or the papers of those without code: see published.py."""

from typing import Any

Sourced = dict[str, tuple[Any, str]]

FLOW = "yifan123/flow_grpo config/grpo.py"
BASE = "yifan123/flow_grpo config/base.py"
GUARD = "yifan123/flow_grpo config/grpo_guard.py"
STEP = "yifan123/flow_grpo flow_grpo/diffusers_patch/sd3_sde_with_logprob.py"
DANCE = "XueZeyue/DanceGRPO scripts/finetune/finetune_flux_grpo.sh"
MIX = "Tencent-Hunyuan/MixGRPO scripts/finetune/finetune_flux_grpo_MixGRPO.sh"
FLASH = "Tencent-Hunyuan/MixGRPO scripts/finetune/finetune_flux_grpo_MixGRPO_Flash.sh"
DPPO = "Tencent-Hunyuan/UniRL examples/diffusion/sd3_flowdppo.yaml"
TEMP = "Shredded-Pork/TempFlow-GRPO config/dgx.py"
TEMP_RUN = "Shredded-Pork/TempFlow-GRPO scripts/multi_node/train_sd3_pr.sh"
TEMP_STEP = "Shredded-Pork/TempFlow-GRPO flow_grpo/diffusers_patch/sd3_sde_with_logprob_perstep.py"
BRANCH = "Fredreic1849/BranchGRPO scripts/finetune/finetune_flux_branchgrpo_8gpus.sh"
DDPO = "kvablack/ddpo-pytorch config/base.py"
DDPO_JPEG = "kvablack/ddpo-pytorch config/dgx.py"

ALL_WEIGHTS = "published for all weights; gerl trains a LoRA"
MODEL_STEPS = "steps are a model's: the experiment sets them"
SMALL = "a step that a small machine can take; the recipes have the published one"
GUIDANCE = "null is the pipeline's own: models that were distilled to take guidance need theirs; the recipes set it"
KL_BY_REWARD = "published by reward, at the price of a third pass: the experiment sets it"


def clip(value: float, source: str, dimensions: int = 65536) -> Sourced:
    """Both bounds and the size of the latents that they are published for."""
    return {
        "algorithm.clip_low": (value, source),
        "algorithm.clip_high": (value, source),
        "algorithm.clip_dimensions": (dimensions, "latents of the published model and resolution"),
    }


FLOW_GRPO: Sourced = {
    "actor.updates_per_step": (2, f"{FLOW}:98"),
    "actor.lr": (3e-4, f"{BASE}:76"),
    "algorithm.advantage_std": ("batch", f"{FLOW}:108"),
    "algorithm.advantage_clip": (5.0, f"{BASE}:97"),
    "algorithm.kl_coef": (0.04, f"{FLOW}:106"),
    "algorithm.likelihood": ("gaussian", f"{STEP}:64"),
    "algorithm.timestep_fraction": (1.0, f"{FLOW}:104, 0.99 of 10: all but the last, which is never stochastic here"),
    "algorithm.timestep_weights": ("uniform", "yifan123/flow_grpo scripts/train_sd3.py:879"),
    "sampling.kernel": ("flow_sde", f"{STEP}:53"),
    "sampling.noise_level": (0.7, f"{BASE}:61"),
    "rollout.n": (24, f"{FLOW}:96"),
    "rollout.prompts_per_step": (48, f"{FLOW}:97"),
    "sampling.guidance_scale": (4.5, f"{FLOW}:92"),
    "sampling.num_inference_steps": (10, f"{FLOW}:90"),
    "sampling.same_init_noise": (False, f"{FLOW}:110"),
    "sampling.window_size": (None, f"{FLOW}:83"),
} | clip(1e-4, f"{BASE}:99")

MIX_GRPO: Sourced = {
    "actor.updates_per_step": (4, f"{MIX}:68 and :150, 12 images by 3"),
    "actor.lr": (1e-5, f"{MIX}:135"),
    "algorithm.advantage_std": ("group", "Tencent-Hunyuan/MixGRPO fastvideo/train_grpo_flux.py:448"),
    "algorithm.advantage_clip": (5.0, f"{MIX}:157"),
    "algorithm.kl_coef": (0.0, f"{MIX}:56"),
    "algorithm.timestep_fraction": (1.0, "Tencent-Hunyuan/MixGRPO fastvideo/train_grpo_flux.py, all of the window"),
    "sampling.kernel": ("flow_sde", f"{MIX}:196"),
    "sampling.noise_level": (0.7, f"{MIX}:55"),
    "sampling.guidance_scale": (3.5, "Tencent-Hunyuan/MixGRPO fastvideo/train_grpo_flux.py:134"),
    "rollout.n": (12, f"{MIX}:150"),
    "rollout.prompts_per_step": (32, f"{MIX}:82 and :128, one on each of 4 x 8 GPUs"),
    "sampling.num_inference_steps": (25, f"{MIX}:54"),
    "sampling.sigmas": ("linear", "Tencent-Hunyuan/MixGRPO fastvideo/train_grpo_flux.py:187"),
    "sampling.same_init_noise": (True, f"{MIX}:155"),
    "sampling.window_size": (4, f"{MIX}:58"),
    "sampling.window_schedule": ("progressive", f"{MIX}:59"),
    "sampling.window_stride": (1, f"{MIX}:60"),
    "sampling.window_every": (25, f"{MIX}:57"),
    "sampling.solver": ("euler", f"{MIX}:75"),
    "sampling.compression": (1.0, f"{MIX}:75"),
} | clip(1e-4, f"{MIX}:156", 16 * 90 * 90)

PUBLISHED: dict[str, Sourced] = {
    "flow_grpo": FLOW_GRPO,
    "flow_grpo_fast": FLOW_GRPO
    | {
        "actor.updates_per_step": (2, f"{FLOW}:183"),
        "algorithm.advantage_std": ("batch", f"{FLOW}:187"),
        "algorithm.kl_coef": (0.0, f"{FLOW}:186"),
        "algorithm.likelihood": ("squared_error", f"{STEP}:86"),
        "algorithm.timestep_fraction": (1.0, f"{BASE}:105"),
        "sampling.guidance_scale": (1.0, f"{FLOW}:172"),
        "rollout.n": (24, f"{FLOW}:178"),
        "rollout.prompts_per_step": (48, f"{FLOW}:179"),
        "sampling.num_inference_steps": (10, f"{FLOW}:170"),
        "sampling.kernel": ("cps", f"{FLOW}:191"),
        "sampling.noise_level": (0.8, f"{FLOW}:188"),
        "sampling.window_size": (3, f"{FLOW}:189"),
        "sampling.window_range": ([0, 5], f"{FLOW}:190"),
        "sampling.window_schedule": ("random", "yifan123/flow_grpo scripts/train_sd3_fast.py:662"),
    }
    | clip(1e-5, f"{FLOW}:185"),
    "grpo_guard": {k: v for k, v in FLOW_GRPO.items() if k != "algorithm.likelihood"}
    | {
        "actor.updates_per_step": (2, f"{GUARD}:50"),
        "actor.lr": (1e-4, f"{GUARD}:78"),
        "algorithm.advantage_std": ("group", f"{GUARD}:60"),
        "algorithm.kl_coef": (0.0, f"{GUARD}:58"),
        "algorithm.timestep_weights": ("inverse_dt", "yifan123/flow_grpo scripts/train_sd3_GRPO_Guard.py:932"),
        "sampling.num_inference_steps": (10, f"{GUARD}:37"),
        "sampling.guidance_scale": (4.5, f"{GUARD}:39"),
        "rollout.n": (24, f"{GUARD}:47"),
        "rollout.prompts_per_step": (48, f"{GUARD}:48"),
        "sampling.same_init_noise": (False, f"{GUARD}:62"),
    }
    | clip(2e-6, f"{GUARD}:76"),
    "flow_dppo": {
        "actor.updates_per_step": (2, f"{DPPO}:123"),
        "actor.lr": (3e-4, f"{DPPO}:64"),
        "algorithm.advantage_std": ("batch", f"{DPPO}:27"),
        "algorithm.kl_threshold": (1e-5, f"{DPPO}:116"),
        "algorithm.kl_coef": (0.0, f"{DPPO}:108, none"),
        "sampling.kernel": ("flow_sde", f"{DPPO}:47"),
        "sampling.noise_level": (0.7, f"{DPPO}:141"),
        "sampling.num_inference_steps": (10, f"{DPPO}:137"),
        "sampling.guidance_scale": (1.0, f"{DPPO}:138"),
        "rollout.n": (16, f"{DPPO}:142"),
        "rollout.prompts_per_step": (48, f"{DPPO}:20"),
        "sampling.same_init_noise": (False, f"{DPPO}:144"),
        "sampling.window_size": (3, f"{DPPO}:152, of any three steps; here they follow each other"),
        "sampling.window_range": ([0, 5], f"{DPPO}:151"),
    },
    "dance_grpo": {
        "actor.updates_per_step": (3, f"{DANCE}:34 and :52, 12 images by 4"),
        "actor.lr": (3e-4, "XueZeyue/DanceGRPO scripts/finetune/finetune_flux_grpo_8gpus_lora.sh:33"),
        "algorithm.advantage_std": ("group", "XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py:542"),
        "algorithm.advantage_clip": (5.0, f"{DANCE}:59"),
        "algorithm.kl_coef": (0.0, f"{DANCE}, none"),
        "algorithm.timestep_fraction": (0.6, f"{DANCE}:56"),
        "sampling.kernel": ("dance_sde", "XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py:131"),
        "sampling.noise_level": (0.3, f"{DANCE}:46"),
        "sampling.guidance_scale": (3.5, "XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py:240"),
        "rollout.n": (12, f"{DANCE}:52"),
        "rollout.prompts_per_step": (16, f"{DANCE}:21 and :29, one on each of 2 x 8 GPUs"),
        "sampling.num_inference_steps": (16, f"{DANCE}:45"),
        "sampling.sigmas": ("linear", "XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py:311"),
        "sampling.same_init_noise": (True, f"{DANCE}:57"),
        "sampling.window_size": (None, f"{DANCE}, none"),
    }
    | clip(1e-4, f"{DANCE}:58", 16 * 90 * 90),
    "mix_grpo": MIX_GRPO,
    "mix_grpo_flash": MIX_GRPO
    | {
        "sampling.window_every": (20, f"{FLASH}:57"),
        "sampling.solver": ("dpm2", f"{FLASH}:75"),
        "sampling.compression": (0.4, f"{FLASH}:77"),
    },
    "tempflow_grpo": {
        "actor.updates_per_step": (2, f"{TEMP}:142 and :146"),
        "actor.lr": (3e-4, "Shredded-Pork/TempFlow-GRPO config/base.py"),
        "algorithm.advantage_std": ("group", f"{TEMP}:151"),
        "algorithm.branch_factor": (6, f"{TEMP_STEP}:64"),
        "algorithm.kl_coef": (0.004, f"{TEMP}:149"),
        "algorithm.timestep_weights": ("std", "Shredded-Pork/TempFlow-GRPO scripts/train_sd3_pr.py"),
        "rollout.n": (4, f"{TEMP}:141"),
        "rollout.prompts_per_step": (
            48,
            f"{TEMP_RUN}:4, config/dgx.py:140-142: 48 GPUs, 4 batches of an image, 4 of a prompt",
        ),
        "sampling.guidance_scale": (4.5, f"{TEMP}:136"),
        "sampling.kernel": ("flow_sde", f"{TEMP_STEP}:51"),
        "sampling.noise_level": (0.7, f"{TEMP_STEP}:48"),
        "sampling.num_inference_steps": (10, f"{TEMP}:134"),
    }
    | clip(1e-4, "Shredded-Pork/TempFlow-GRPO config/base.py"),
    "branch_grpo": {
        "actor.updates_per_step": (34, f"{BRANCH}:71, about 400 edges of two trees by 12"),
        "actor.lr": (1e-5, f"{BRANCH}:73"),
        "algorithm.advantage_clip": (5.0, f"{BRANCH}:95"),
        "algorithm.branch_factor": (2, "arXiv 2509.06040"),
        "algorithm.kl_coef": (0.0, f"{BRANCH}, none"),
        "algorithm.split_steps": ([0, 3, 6, 9], f"{BRANCH}:28"),
        "algorithm.split_noise": (4.0, f"{BRANCH}:29"),
        "rollout.n": (1, f"{BRANCH}:89, one tree of 16 images"),
        "rollout.prompts_per_step": (16, f"{BRANCH}:58 and :66, two on each of 8 GPUs"),
        "sampling.guidance_scale": (3.5, "Fredreic1849/BranchGRPO fastvideo/train_branchgrpo_flux.py:735"),
        "sampling.kernel": ("dance_sde", "Fredreic1849/BranchGRPO fastvideo/train_branchgrpo_flux.py:229"),
        "sampling.noise_level": (0.3, f"{BRANCH}:83"),
        "sampling.num_inference_steps": (20, f"{BRANCH}:82"),
        "sampling.sigmas": ("linear", "Fredreic1849/BranchGRPO fastvideo/train_branchgrpo_flux.py:773"),
    }
    | clip(1e-3, f"{BRANCH}:94", 16 * 90 * 90),
    "ddpo": {
        "actor.updates_per_step": (4, f"{DDPO_JPEG}:22"),
        "actor.lr": (3e-4, f"{DDPO}:64"),
        "algorithm.advantage_clip": (5.0, f"{DDPO}:85"),
        "algorithm.history": (16, f"{DDPO_JPEG}:34"),
        "algorithm.kl_coef": (0.0, "kvablack/ddpo-pytorch scripts/train.py, none"),
        "algorithm.likelihood": ("gaussian", "kvablack/ddpo-pytorch ddpo_pytorch/diffusers_patch/ddim_with_logprob.py"),
        "algorithm.timestep_fraction": (1.0, f"{DDPO}:90"),
        "sampling.kernel": ("ddim", "kvablack/ddpo-pytorch ddpo_pytorch/diffusers_patch/ddim_with_logprob.py"),
        "sampling.noise_level": (1.0, f"{DDPO}:48"),
        "sampling.num_inference_steps": (50, f"{DDPO}:45"),
        "sampling.guidance_scale": (5.0, f"{DDPO}:50"),
        "rollout.n": (1, "kvablack/ddpo-pytorch scripts/train.py:319, each image with a prompt of its own"),
        "rollout.prompts_per_step": (256, f"{DDPO_JPEG}:18"),
    }
    | clip(1e-4, f"{DDPO}:87", 4 * 64 * 64),
    "dense_grpo": {  # what the paper does not say is Flow-GRPO's, whose settings its appendix A adopts
        "algorithm.advantage_std": ("group", "arXiv 2601.20218 equation 10"),
        "sampling.num_inference_steps": (10, "arXiv 2601.20218 section 5.1"),
        "sampling.noise_level": (0.7, "arXiv 2601.20218 section 5.3"),
        "sampling.guidance_scale": (4.5, f"{FLOW}:92"),
        "rollout.n": (24, "arXiv 2601.20218 section 5.1"),
        "rollout.prompts_per_step": (48, f"{FLOW}:97"),
        "actor.lr": (3e-4, "arXiv 2601.20218 appendix A"),
        "actor.updates_per_step": (2, f"{FLOW}:98"),
    },
    "neighbor_grpo": {
        "algorithm.timesteps": (4, "arXiv 2511.16955 table 3"),
        "algorithm.anchors": (4, "arXiv 2511.16955 table 5"),
        "algorithm.quasi_norm": (0.8, "arXiv 2511.16955 table 6"),
        "algorithm.clip_low": (1e-4, "arXiv 2603.17461 section 5.1"),
        "algorithm.clip_high": (1e-4, "arXiv 2603.17461 section 5.1"),
        "algorithm.kl_coef": (0.0, "arXiv 2511.16955, none"),
        "sampling.kernel": ("ode", "arXiv 2511.16955"),
        "sampling.num_inference_steps": (8, "arXiv 2511.16955 table 1"),
        "sampling.same_init_noise": (True, "arXiv 2511.16955 equation 7"),
        "sampling.init_noise_spread": (0.3, "arXiv 2511.16955 table 4"),
        "rollout.n": (12, "arXiv 2511.16955 section 3.4.1"),
        "actor.lr": (1e-5, "arXiv 2511.16955"),
        "actor.updates_per_step": (2, "arXiv 2603.17461 section 5.1"),
    },
    "tree_grpo": {
        "algorithm.branch_factor": (3, "arXiv 2512.08153 table 3"),
        "algorithm.split_steps": (None, "arXiv 2512.08153 section 4"),
        "algorithm.node_std": ("leaves", "arXiv 2512.08153 equations 9 and 11"),
        "algorithm.kl_coef": (0.0, "arXiv 2512.08153, none"),
        "sampling.num_inference_steps": (10, "arXiv 2512.08153 section 5"),
        "sampling.window_size": (3, "arXiv 2512.08153 table 3"),
        "sampling.window_schedule": ("geometric", "arXiv 2512.08153 equation 7"),
        "rollout.n": (1, "arXiv 2512.08153 table 3"),
        "rollout.prompts_per_step": (16, "zh-ding/TreeGRPO README.md, sample.num_prompts=2 on each of 8 GPUs"),
        "actor.lr": (1e-5, "arXiv 2512.08153"),
    },
}

STEP: Sourced = {"rollout.prompts_per_step": (8, SMALL), "sampling.guidance_scale": (None, GUIDANCE)}
SIZE: Sourced = STEP | {"rollout.n": (12, SMALL)}

DEVIATIONS: dict[str, Sourced] = {
    "flow_grpo_fast": SIZE,
    "flow_dppo": SIZE,
    "grpo_guard": SIZE,
    "dense_grpo": STEP,
    "ddpo": {
        "rollout.n": (12, "in small steps a prompt seldom comes again: its images of one step fill its history"),
        "rollout.prompts_per_step": (8, SMALL),
    },
    "neighbor_grpo": {"actor.lr": (3e-4, ALL_WEIGHTS)},
    "tree_grpo": {"actor.lr": (3e-4, ALL_WEIGHTS), "rollout.prompts_per_step": (8, SMALL)},
    "flow_grpo": SIZE
    | {
        "algorithm.kl_coef": (0.0, KL_BY_REWARD),
        "algorithm.timestep_weights": (
            "std2_over_jacobian",
            "with uniform ones the noise of the least noisy steps is nearly all of the gradient",
        ),
        "sampling.same_init_noise": (True, "rewards of a group then differ by the noise that is scored only"),
    },
    "dance_grpo": STEP | {"sampling.num_inference_steps": (10, MODEL_STEPS)},
    "mix_grpo": STEP | {"actor.lr": (3e-4, ALL_WEIGHTS), "sampling.num_inference_steps": (10, MODEL_STEPS)},
    "mix_grpo_flash": STEP | {"actor.lr": (3e-4, ALL_WEIGHTS), "sampling.num_inference_steps": (10, MODEL_STEPS)},
    "tempflow_grpo": STEP | {"algorithm.kl_coef": (0.0, KL_BY_REWARD)},
    "branch_grpo": STEP
    | {
        "actor.lr": (3e-4, ALL_WEIGHTS),
        "actor.updates_per_step": (4, "an update takes whole trees, of which a step has few"),
        "algorithm.split_steps": ([0, 1, 3, 4], "the published noise levels, in 10 steps rather than 20"),
        "sampling.num_inference_steps": (10, MODEL_STEPS),
    },
}

OWN: dict[str, dict[str, str]] = {
    "neighbor_grpo": {
        "algorithm.temperature": "it scales all losses, which Adam undoes",
        "rollout.micro_batch_size": "two groups",
    },
    "tree_grpo": {
        "rollout.micro_batch_size": "a tree",
        "actor.updates_per_step": "with one the clip range would never act",
    },
}

NO_CODE = "there is no code, and the paper could not be had again to look it up"
UNSET: dict[str, dict[str, str]] = {
    "neighbor_grpo": {"rollout.prompts_per_step": NO_CODE, "sampling.guidance_scale": NO_CODE},
    "tree_grpo": {
        "sampling.guidance_scale": "the README of its code has none, and the paper could not be had again to look it up"
    },
}
