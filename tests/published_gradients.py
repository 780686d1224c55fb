"""What the official sources of reward gradients, of pairs, of distillation and of given images set.

See published.py for the form of the tables.
"""

from typing import Any

Sourced = dict[str, tuple[Any, str]]

FLOWBP = "RuoyuWang-2077/FlowBP "
SRPO = "Tencent-Hunyuan/SRPO fastvideo/SRPO.py"
SRPO_RUN = "Tencent-Hunyuan/SRPO scripts/finetune/SRPO_training_hpsv2.sh"
REFL = "THUDM/ImageReward ImageReward/ReFL.py"
REFL_RUN = "THUDM/ImageReward scripts/train_refl.sh"
PROP = "mihirp1998/AlignProp config/alignprop_config.py"
FDFO = "NVlabs/finite-difference-flow-optimization fdfo/config.py"
OMNI = "verl-project/verl-omni examples/diffusionopd_trainer/sd35/run_sd35_medium_ocr_distill.sh"
KTO = "jacklishufan/diffusion-kto train_kto_sd_v1.5.py"
KTO_RUN = "jacklishufan/diffusion-kto exps/example.sh"
DPO = "SalesforceAIResearch/DiffusionDPO train.py"
DPO_RUN = "SalesforceAIResearch/DiffusionDPO launchers/sd15.sh"
DMDR = "vvvvvjdy/dmdr train_cc/sit/scripts/dmdr_sitxl_refl.sh"
DDRL = "nvidia-cosmos/cosmos-rl examples/ddrl.md"
DDRL_2B = "configs/cosmos-predict2-5/cosmos-predict2-5-2b-720-reason-embedding-ddrl.toml"

SMALL = "a step that a small machine can take"
LEVELS = "the noise levels of the sampler's steps are those to choose from"
ALL_WEIGHTS = "published for all weights; gerl trains a LoRA"
GUIDANCE = "null is the pipeline's own, which for the published model is the published one"


def flowbp(name: str, yaml: str, of_latents: bool, **extra: tuple[Any, int]) -> Sourced:
    """What the presets after FlowBP share; the lines of its configurations differ by one in flowbp_bridge."""
    file, off = f"{FLOWBP}configs/final/sd35/sd3_5_{yaml}.yaml", -1 if name == "flowbp_bridge" else 0
    rows: Sourced = {
        "algorithm.margin": (0.55, f"{file}:{48 + off}"),
        "algorithm.loss_scale": (1.0, f"{file}:{49 + off}"),
        "sampling.num_inference_steps": (25, f"{file}:{42 + off}"),
        "sampling.guidance_scale": (3.5, f"{file}:{44 + off}"),
        "sampling.kernel": ("ode", f"{FLOWBP}flowbp/trainers/sd35/leapalign.py:102"),
        "sampling.sigmas": ("linear", f"{FLOWBP}flowbp/trainers/sd35/leapalign.py:102"),
        "rollout.prompts_per_step": (64 if of_latents else 32, f"{file}:{20 + off}, on each of 8 GPUs"),
        "actor.lr": (1e-5, f"{file}:{29 + off}"),
        "actor.weight_decay": (1e-4, f"{file}:{30 + off}"),
        "actor.max_grad_norm": (1.0, f"{file}:{32 + off}"),
        "actor.ema_decay": (0.995, f"{file}:9"),
        "actor.updates_per_step": (1, f"{file}:{22 + off}"),
    }
    return rows | {f"algorithm.{key}": (value, f"{file}:{line}") for key, (value, line) in extra.items()}


PUBLISHED: dict[str, Sourced] = {
    "draft_lv": flowbp("draft_lv", "draft_lv", False, noised_copies=(2, 55), cfg=("detach_uncond", 59)),
    "drtune": flowbp("drtune", "drtune", True, cfg=("detach_uncond", 60))
    | {
        "algorithm.late": (10, f"{FLOWBP}flowbp/trainers/sd35/drtune.py:17, 0.4 of 25"),
        "algorithm.active": (3, f"{FLOWBP}flowbp/trainers/sd35/drtune.py:16"),
    },
    "leapalign": flowbp("leapalign", "leapalign", True, nested=(0.3, 55), tau=(0.1, 56), cfg=("joint", 60)),
    "flowbp_sparse": flowbp(
        "flowbp_sparse", "flowbp_sparse", True, active=(4, 57), bias=(1.0, 58), rescale=(0.5, 59),
        cfg=("detach_uncond", 63),
    ),
    "flowbp_bridge": flowbp(
        "flowbp_bridge", "flowbp_bridge", True, active=(5, 57), bias=(4.0, 58), rescale=(0.0, 59), nested=(0.5, 62),
        cfg=("detach_uncond", 65),
    ),
    "flowbp_lagrange": flowbp(
        "flowbp_lagrange", "flowbp_lagrange", True, supports=(3, 65), second=(0.25, 68), nested=(0.1, 63),
        tau=(0.2, 64), parts=([2.5, 6.0, 2.0], 57), latest=(10, 60), cfg=("detach_uncond", 75),
    ),
    "srpo": {  # FLUX.1-dev, HPSv2.1
        "algorithm.margin": (0.7, f"{SRPO}:623"),
        "algorithm.positive": (["Natural-lighting", "Detail", "Detailed", "Real"], f"{SRPO}:87"),
        "algorithm.negative": (["Concept art", "Painting", "Anime", "Flat", "Oil"], f"{SRPO}:67"),
        "algorithm.levels": ([0.75, 0.964], f"{SRPO}:534, of steps 5 and 25 of 50 with a shift of 3"),
        "algorithm.span": (0.022, f"{SRPO}:520, 101 of 1000 levels"),
        "algorithm.strength": ([0.1, 0.25], f"{SRPO_RUN}:49"),
        "algorithm.inverted_strength": ([0.3, 0.01], f"{SRPO_RUN}:48"),
        "sampling.num_inference_steps": (25, f"{SRPO_RUN}:39"),
        "sampling.sigmas": ("linear", f"{SRPO}:431"),
        "sampling.guidance_scale": (3.5, f"{SRPO}:570, in training; the rollout has 1 ({SRPO_RUN}:34)"),
        "actor.lr": (5e-6, f"{SRPO_RUN}:30"),
        "actor.weight_decay": (1e-4, f"{SRPO_RUN}:45"),
        "actor.max_grad_norm": (0.1, f"{SRPO_RUN}:44"),
        "actor.updates_per_step": (1, f"{SRPO_RUN}:28, both branches are accumulated"),
    },
    "refl": {  # Stable Diffusion 1.4, ImageReward
        "algorithm.late": (10, f"{REFL}:717"),
        "algorithm.margin": (2.0, f"{REFL}:755"),
        "algorithm.loss_scale": (1e-3, f"{REFL_RUN}:12"),
        "sampling.num_inference_steps": (40, f"{REFL}:714"),
        "sampling.guidance_scale": (1.0, f"{REFL}:723"),
        "sampling.kernel": ("ddim", f"{REFL}:405, DDPM's steps"),
        "rollout.prompts_per_step": (64, f"{REFL_RUN}:4, on each of 8 GPUs, 4 times"),
        "actor.lr": (1e-5, f"{REFL_RUN}:8"),
        "actor.max_grad_norm": (1.0, f"{REFL_RUN}:9"),
        "actor.ema_decay": (0.9999, f"{REFL_RUN}:2, the default of its EMAModel"),
        "actor.updates_per_step": (1, f"{REFL_RUN}:5"),
    },
    "alignprop": {  # Stable Diffusion 1.5, aesthetic score
        "algorithm.last": (8, f"{PROP}:112"),
        "algorithm.last_std": (5.0, f"{PROP}:112"),
        "algorithm.target": (10.0, f"{PROP}:107"),
        "algorithm.loss_scale": (0.01, f"{PROP}:106"),
        "sampling.noise_level": (1.0, f"{PROP}:108"),
        "sampling.num_inference_steps": (50, f"{PROP}:103"),
        "sampling.guidance_scale": (5.0, f"{PROP}:109"),
        "rollout.prompts_per_step": (128, "mihirp1998/AlignProp aesthetic.sh:1"),
        "actor.lr": (1e-3, f"{PROP}:116"),
        "actor.betas": ([0.9, 0.999], f"{PROP}:117"),
        "actor.weight_decay": (1e-4, f"{PROP}:119"),
        "actor.eps": (1e-8, f"{PROP}:120"),
        "actor.max_grad_norm": (1.0, f"{PROP}:122"),
        "actor.updates_per_step": (1, "mihirp1998/AlignProp aesthetic.sh:5"),
    },
    "fdfo": {  # SD3.5-M
        "algorithm.ratio_width": (0.03, f"{FDFO}:23"),
        "algorithm.kl_coef": (0.0, f"{FDFO}:30"),
        "sampling.kernel": ("cps", "NVlabs/finite-difference-flow-optimization fdfo/sampling.py:14"),
        "sampling.noise_level": (0.045, f"{FDFO}:123"),
        "sampling.num_inference_steps": (40, f"{FDFO}:13"),
        "sampling.guidance_scale": (1.0, f"{FDFO}:14"),
        "sampling.window_range": ([0, None], "NVlabs/finite-difference-flow-optimization fdfo/train_loop.py:182"),
        "rollout.n": (2, "NVlabs/finite-difference-flow-optimization fdfo/train_loop.py:143"),
        "rollout.prompts_per_step": (432, f"{FDFO}:116"),
        "actor.lr": (3e-5, f"{FDFO}:22"),
        "actor.betas": ([0.9, 0.999], f"{FDFO}:24"),
        "actor.weight_decay": (1e-4, f"{FDFO}:26"),
        "actor.eps": (1e-8, f"{FDFO}:27"),
        "actor.max_grad_norm": (1.0, f"{FDFO}:29"),
        "actor.updates_per_step": (4, f"{FDFO}:117"),
    },
    "opd": {  # SD3.5-M, OCR
        "algorithm.distance": ("gaussian", f"{OMNI}:63"),
        "algorithm.kl_coef": (0.0, f"{OMNI}:66"),
        "sampling.kernel": ("cps", f"{OMNI}:91"),
        "sampling.noise_level": (0.8, f"{OMNI}:90"),
        "sampling.window_size": (3, f"{OMNI}:92"),
        "sampling.window_range": ([0, 5], f"{OMNI}:93"),
        "sampling.num_inference_steps": (10, f"{OMNI}:86"),
        "sampling.guidance_scale": (1.0, f"{OMNI}:87"),
        "rollout.n": (8, f"{OMNI}:80"),
        "rollout.prompts_per_step": (8, f"{OMNI}:48"),
        "actor.lr": (1e-4, f"{OMNI}:67"),
        "actor.weight_decay": (1e-4, f"{OMNI}:68"),
        "actor.updates_per_step": (2, f"{OMNI}:69"),
    },
    "kto": {  # Stable Diffusion 1.5
        "algorithm.beta": (1000.0, f"{KTO}:387"),
        "algorithm.weight_liked": (1.0, f"{KTO}:394"),
        "algorithm.weight_disliked": (1.0, f"{KTO}:400"),
        "rollout.prompts_per_step": (8, f"{KTO_RUN}:12"),
        "actor.lr": (1e-7, f"{KTO_RUN}:19"),
        "actor.updates_per_step": (1, f"{KTO_RUN}:13"),
    },
    "sft": {
        "actor.updates_per_step": (1, f"{DPO_RUN}:12"),
        "rollout.prompts_per_step": (2048, f"{DPO_RUN}:5"),
        "actor.lr": (2.05e-5, f"{DPO_RUN}:15, 1e-8 for each of 2048 images"),
    },
    "diffusion_dpo_offline": {
        "algorithm.reference": ("base", f"{DPO}:1132"),
        "algorithm.beta": (5000.0, f"{DPO_RUN}:18"),
        "rollout.prompts_per_step": (2048, f"{DPO_RUN}:5"),
        "actor.lr": (2.05e-5, f"{DPO_RUN}:15, 1e-8 for each of 2048 pairs"),
        "actor.updates_per_step": (1, f"{DPO_RUN}:12"),
    },
    "dmdr": {  # SiT-XL/2, classes
        "algorithm.matching_coef": (1.0, "vvvvvjdy/dmdr train_cc/sit/train_sitxl_refl_deepspeed.py:566"),
        "algorithm.fake_scale": (2.0, f"{DMDR}:23"),
        "sampling.num_inference_steps": (1, f"{DMDR}:20"),
        "sampling.guidance_scale": (1.0, "vvvvvjdy/dmdr train_cc/sit/train_sitxl_refl_deepspeed.py:416, none"),
        "rollout.n": (1, "vvvvvjdy/dmdr train_cc/sit/train_sitxl_refl_deepspeed.py:411, a class of its own for each"),
        "rollout.prompts_per_step": (192, f"{DMDR}:28, on each of 8 GPUs"),
        "actor.lr": (1e-5, f"{DMDR}:30"),
    },
    "draft": {"algorithm.name": ("draft", "arXiv 2309.17400")},
    "rwr": {"algorithm.name": ("rwr", "arXiv 2302.12192")},
    "ddrl": {  # Cosmos-Predict 2.5
        "algorithm.data_coef": (0.01, f"{DDRL}:95"),
        "algorithm.kl_coef": (0.0, f"{DDRL}:94"),
        "algorithm.clip_low": (1e-4, f"{DDRL}:93"),
        "algorithm.clip_high": (1e-4, f"{DDRL}:93"),
        "algorithm.advantage_clip": (5.0, "nvidia-cosmos/cosmos-rl cosmos_rl/policy/config/wfm/__init__.py:138"),
        "sampling.num_inference_steps": (20, f"{DDRL}:74"),
        "sampling.same_init_noise": (False, f"{DDRL}:80"),
        "sampling.guidance_scale": (1.0, f"{DDRL}:88, 0 of Cosmos, which means the same"),
        "rollout.n": (8, f"{DDRL}:71"),
        "rollout.prompts_per_step": (16, f"{DDRL}:49 and :69, 256 GPUs / 8 images / 2 GPUs of an image ({DDRL_2B}:32)"),
        "actor.lr": (1e-5, f"nvidia-cosmos/cosmos-rl {DDRL_2B}:212"),
    },
}  # fmt: skip

DEVIATIONS: dict[str, Sourced] = {
    "srpo": {"sampling.guidance_scale": (None, GUIDANCE)},
    "refl": {
        "sampling.kernel": ("ode", "set up for flow matching, whose sampler has no noise"),
        "actor.ema_decay": (0.9, "an average over 10,000 steps is not reached in a short run"),
    },
    "fdfo": {"rollout.prompts_per_step": (48, SMALL)},
    "opd": {
        "rollout.n": (1, "images are not compared, so each has a prompt of its own"),
        "actor.updates_per_step": (1, "on policy, as the distance to the teacher is defined"),
    },
    "kto": {"rollout.prompts_per_step": (16, "one GPU takes them"), "actor.lr": (3e-4, ALL_WEIGHTS)},
    "sft": {"rollout.prompts_per_step": (16, SMALL), "actor.lr": (3e-4, ALL_WEIGHTS)},
    "diffusion_dpo_offline": {"rollout.prompts_per_step": (16, SMALL), "actor.lr": (3e-4, ALL_WEIGHTS)},
    "dmdr": {
        "algorithm.matching_coef": (0.01, "published beside a reward that is differentiated"),
        "sampling.num_inference_steps": (4, "what most few-step models are made for"),
        "sampling.guidance_scale": (None, "null is the pipeline's own: few-step models sample as they were distilled"),
        "rollout.n": (12, "published beside a reward that is differentiated; a policy gradient compares images"),
        "rollout.prompts_per_step": (8, SMALL),
        "actor.lr": (3e-4, ALL_WEIGHTS),
    },
    "ddrl": {"rollout.prompts_per_step": (8, SMALL), "actor.lr": (3e-4, ALL_WEIGHTS)},
}

ALONE = "a gradient compares no images"
CHOICE = "the sampler is gerl's"
OWN: dict[str, dict[str, str]] = {
    **{name: {"rollout.n": ALONE} for name in ("draft_lv", "drtune", "leapalign", "refl")},
    **{name: {"rollout.n": ALONE} for name in ("flowbp_sparse", "flowbp_bridge", "flowbp_lagrange")},
    "srpo": {"rollout.n": ALONE, "sampling.kernel": CHOICE},
    "alignprop": {"rollout.n": ALONE, "sampling.kernel": CHOICE},
    "opd": {"algorithm.teachers": "an example, for want of a user's own"},
    **{
        name: {
            "algorithm.timesteps": "one was drawn of each image there; more have less variance",
            "data.train_on": "the images of a file are trained on",
            "sampling.num_inference_steps": LEVELS,
            "sampling.kernel": "nothing is drawn in training",
            "sampling.window_range": "all levels",
            "validation.num_inference_steps": "fewer than there are levels to choose from",
        }
        for name in ("kto", "sft", "diffusion_dpo_offline")
    },
    "dmdr": {
        key: "as the preset few_step_grpo"
        for key in (
            "algorithm.matching_steps", "algorithm.timestep_weights", "sampling.kernel", "sampling.noise_level",
            "sampling.window_range", "sampling.same_init_noise", "rollout.micro_batch_size",
            "actor.updates_per_step",
        )
    },
    "draft": {
        key: "nothing was published, or could not be read"
        for key in (
            "algorithm.last", "sampling.num_inference_steps", "sampling.kernel", "rollout.n", "actor.updates_per_step",
        )
    },
    "rwr": {
        key: "nothing was published for flow matching"
        for key in (
            "algorithm.beta", "algorithm.advantage_clip", "sampling.kernel", "sampling.solver", "sampling.sigmas",
            "actor.updates_per_step",
        )
    },
    "ddrl": {"sampling.kernel": "as flow_grpo", "sampling.noise_level": "as flow_grpo"},
}  # fmt: skip

FILES = "images of a file are trained on, and nothing is sampled"
NO_CODE = "there is no code, and the paper could not be had again to look it up"
FIXED = "published for a fixed set of images and all weights of Stable Diffusion 1.5, not for rollouts"
UNSET: dict[str, dict[str, str]] = {
    **{
        name: {"sampling.guidance_scale": FILES, "rollout.n": FILES} for name in ("kto", "sft", "diffusion_dpo_offline")
    },
    "srpo": {"rollout.prompts_per_step": f"one on each GPU, of which the script ({SRPO_RUN}:1) leaves the number open"},
    "draft": dict.fromkeys(("sampling.guidance_scale", "rollout.prompts_per_step", "actor.lr"), NO_CODE),
    "rwr": dict.fromkeys(("sampling.guidance_scale", "rollout.n", "rollout.prompts_per_step", "actor.lr"), FIXED),
}
