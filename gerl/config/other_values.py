# ruff: noqa: E501 - a row is a line
"""Values of other programs, and gerl's for the same, or why there is none. Tables, for hints only; see `elsewhere`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Why:
    """Why nothing can be written for a value; `{}` in it is that value. key: what is to be set in its place, if any."""

    text: str
    key: str = ""


# of a name: what is written for one of its values, `KEY=VALUE ...` or nothing; other values are those of gerl's key
FLAGS: dict[str, dict[str, str | Why]] = {
    "use_lora use_peft lora.enabled": {"true": "model.train=lora", "false": "model.train=full"},
    "fp16": {"true": "model.dtype=float16", "false": ""},
    "bf16": {"true": "model.dtype=bfloat16", "false": ""},
    "load_in_8bit": {"true": "model.quantize=int8", "false": "model.quantize=none"},
    "load_in_4bit": {"true": "model.quantize=nf4", "false": "model.quantize=none"},
    "fp8_base": {"true": "model.quantize=fp8", "false": "model.quantize=none"},
    "param_offload cpu_offload enable_sequential_cpu_offload low_vram lowvram": {
        "true": "model.offload=blocks",
        "false": "model.offload=none",
    },
    "enable_model_cpu_offload": {"true": "model.offload=encoders", "false": "model.offload=none"},
    "torch_compile use_torch_compile": {"true": "model.compile=inductor", "false": "model.compile=null"},
    "xformers": {"true": "model.attention=xformers", "false": ""},
    "sdpa": {"true": "model.attention=null", "false": ""},
    "global_std sample.global_std": {"true": "algorithm.advantage_std=batch", "false": "algorithm.advantage_std=group"},
    "normalize_rewards scale_rewards normalize_advantages norm_adv_by_std_in_grpo": {
        "true": "algorithm.advantage_std=group",
        "false": "algorithm.advantage_std=none",
    },
    "use_leave_one_out_baseline leave_one_out": {
        "true": "algorithm.adv_estimator=rloo",
        "false": "algorithm.adv_estimator=grpo",
    },
    "train.cfg": {"true": "algorithm.cfg=detach_uncond", "false": "algorithm.cfg=off"},
    "train_cfg": {"true": "algorithm.cfg=joint", "false": "algorithm.cfg=off"},
    "detach_uncond": {"true": "algorithm.cfg=detach_uncond", "false": "algorithm.cfg=joint"},
    "ema train.ema use_ema": {"true": "actor.ema_decay=0.9", "false": "actor.ema_decay=0"},
    "use_8bit_adam train_use_8bit_adam": {"true": "actor.optimizer=adamw8bit", "false": "actor.optimizer=adamw"},
    "per_prompt_stat_tracking": {
        "true": "algorithm.history=0",
        "false": "algorithm.adv_estimator=reinforce_pp algorithm.advantage_std=batch",
    },
    "use_kl_loss": {
        "true": Why("it is on if its weight, theirs kl_loss_coef, is above 0", "algorithm.kl_coef"),
        "false": "algorithm.kl_coef=0",
    },
    "use_dynamic_sampling filter_groups filter_groups.enable": {
        "true": Why("VALUE is how often a step samples further prompts, such as 2", "algorithm.dynamic_sampling"),
        "false": "algorithm.dynamic_sampling=0",
    },
    "async_weight_update async_strategy async_grpo.enabled": {
        "true": "trainer.staleness=1",
        "one-step-off": "trainer.staleness=1",
        "false": "trainer.staleness=0",
        "none": "trainer.staleness=0",
        "null": "trainer.staleness=0",
    },
    "hybrid_engine colocate colocated.enabled": {"true": "cluster.layout=hybrid", "false": "cluster.layout=split"},
    "checkpointing.enabled": {"true": "", "false": "checkpoint.every=0"},
    "wandb_enabled": {"true": "logger.trackers=[tensorboard,wandb]", "false": ""},
    "reward_adaptive_kl": {"true": "algorithm.kl_by_reward=true", "false": "algorithm.kl_by_reward=false"},
    "log_val_generations log_completions": {
        "true": "",
        "false": Why("images of every validation are kept, for at least one prompt", "validation.images"),
    },
    "test_freq eval_freq val_freq eval_steps val_period eval_every eval_interval validation_steps": {
        "-1": "validation.data=null",
        "false": "validation.data=null",
        "no": "validation.data=null",
    },
    "save_freq save_steps save_period save_interval save_every checkpointing_steps": {"-1": "checkpoint.every=0"},
    "val_max_samples max_val_samples max_eval_samples": {"-1": "validation.max_prompts=null"},
    "loss_type loss_mode": {
        "dr_grpo": "algorithm.advantage_std=none",
        "dapo": Why("all images have the same length, so token-level and image-level losses are the same"),
        "bnpo": Why("all images have the same length, so token-level and image-level losses are the same"),
    },
    "kl_loss_type": {
        "kl": Why("k1 has no gradient on average in the loss; VALUE is k2, or k3", "algorithm.kl_type"),
        "k1": Why("k1 has no gradient on average in the loss; VALUE is k2, or k3", "algorithm.kl_type"),
    },
}
DAPO = Why(
    "DAPO is algorithm.adv_estimator=grpo with algorithm.clip_high above clip_low and algorithm.dynamic_sampling"
)
CRITIC = Why(
    "it needs a value network, which gerl does not train; algorithm=dense_grpo credits each step by the reward of "
    "the predicted image"
)
ADAM = Why("gerl's optimizer is AdamW: adamw, or adamw8bit")
# of gerl's key: values of other programs; they are known in a refusal of a value as well
VALUES: dict[str, dict[str, str | Why]] = {
    "algorithm": {
        "grpo": "flow_grpo", "flow-grpo": "flow_grpo", "ppo": "flow_grpo", "nft": "diffusion_nft", "dpo": "diffusion_dpo",
        "diffusionnft": "diffusion_nft", "grpo-guard": "grpo_guard", "distill_kl": "opd", "vanilla": "flow_grpo",
        "dance-grpo": "dance_grpo", "dancegrpo": "dance_grpo", "mixgrpo": "mix_grpo", "dapo": DAPO, "gae": CRITIC,
        "flow-grpo-fast": "flow_grpo_fast", "raft": "best_of_n",
    },
    "algorithm.name": {"grpo": "flow_grpo", "nft": "diffusion_nft", "dpo": "diffusion_dpo", "ppo": "flow_grpo"},
    "algorithm.adv_estimator": {
        "reinforce_plus_plus": "reinforce_pp", "reinforce++": "reinforce_pp", "flow_grpo": "grpo", "sum": "grpo",
        "reinforce_plus_plus_baseline": "grpo", "sum_then_normalize": "grpo", "normalize_then_sum": "gdpo",
        "dapo": DAPO, "gae": CRITIC,
    },
    "algorithm.kl_type": {
        "low_var_kl": "k3", "low_var": "k3", "kl": "k1", "mse": "k2", "v-based": "velocity",
        "x-based": Why("the nearest is gaussian, which divides the squared distance of means by twice the variance"),
    },
    "algorithm.regression": {"mse": "squared", "bce": "cross_entropy"},
    "algorithm.weighting": {"t**2": "t2"},
    "algorithm.advantage_std": {"std": "group"},
    "algorithm.cfg": {"true": "joint", "false": "off"},
    "sampling.kernel": {
        "sde": "flow_sde", "flow-sde": "flow_sde", "dance-sde": "dance_sde", "dance": "dance_sde", "flow": "flow_sde",
    },
    "model.train": {"peft": "lora", "true": "lora", "false": "full", "all": "full"},
    "model.dtype": {
        "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "no": "float32", "float": "float32",
        "torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32",
    },
    "model.quantize": {
        "fp4": Why("4 bits is nf4 here"), "null": "none", "8bit": "int8", "4bit": "nf4", "qfloat8": "fp8", "q8": "int8",
        "true": Why("int8, fp8 or nf4"),
    },
    "model.shard": {
        "fsdp": "all", "fsdp2": "all", "full_shard": "all", "hybrid_shard": "all", "no": "none", "no_shard": "none",
        "ddp": "none", "true": "all", "false": "none", "megatron": Why("diffusers denoisers have no Megatron version"),
        "shard_grad_op": Why("weights are sharded, gradients are those of a LoRA; denoiser or all"),
    },
    "model.attention": {"sdpa": "null", "flash_attention_2": "flash", "flash_attn": "flash", "eager": "null"},
    "actor.lr_schedule": {
        "constant_with_warmup": "constant", "cosine_with_restarts": "cosine", "warmup_stable_decay": "linear",
    },
    "actor.optimizer": {
        "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit",
        "adam": ADAM, "adam8bit": ADAM, "prodigy": ADAM, "lion": ADAM, "lion8bit": ADAM, "adafactor": ADAM, "sgd": ADAM,
        "automagic": ADAM, "pagedadamw8bit": "adamw8bit",
    },
    "checkpoint.resume": {"disable": "never", "false": "never", "no": "never", "none": "never", "true": "auto",
                          "latest": "auto", "null": "never", "resume_path": Why("give the folder of the run")},
    "cluster.device": {"gpu": "cuda", "cuda:0": "cuda"},
    "validation.data": {"none": "null", "false": "null", "no": "null"},
}  # fmt: skip
# names whose number needs another one, of the data or of the machines
TOLD = {
    "total_epochs num_train_epochs max_num_epochs max_train_epochs":
        Why(
            "VALUE is {} x prompts of data.train / rollout.prompts_per_step, since a step is one rollout", "trainer.steps"),
    "max_prompt_length":
        Why("VALUE is in tokens of the text encoders, such as 256, not in characters", "sampling.call.max_sequence_length"),
    "timestep_range": Why("VALUE is in steps, as [0,5]; theirs is in fractions", "sampling.window_range"),
    "reward_weights": Why(
        "VALUE is one number, each scorer's weight is set under its name", "reward.scorers.ocr.weight"),
    "reward_model reward_model_path reward_model.model_path reward_model.path reward_function reward.components": Why(
        "a reward model is a scorer: VALUE is {ocr: {weight: 1}} for a built-in one, or {mine: {path: FILE.py}} "
        "for a file that runs it; model.path is the trained model", "reward.scorers",
    ),
    "distillation.enabled": Why("VALUE is a list of teachers, such as [{path: PIPELINE}]", "algorithm.teachers"),
    "dataset_config train_data_dir folder_path": Why(
        "VALUE is a file of prompts: reinforcement learning samples its own images; for existing images see "
        "docs/preferences.md", "data.train",
    ),
}  # fmt: skip
FLAG = {name: values for names, values in FLAGS.items() for name in names.split()}
SAID = {name: why for names, why in TOLD.items() for name in names.split()}
