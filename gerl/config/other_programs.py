"""Tables of other programs' keys and values, with those of gerl that mean the same, or why there are none."""

from collections.abc import Collection
from dataclasses import dataclass

# --- Keys of other programs with the keys of gerl that mean the same, or the reason why there is none: tables for
# hints.
#
# flow_grpo, MM-GRPO, verl, verl-omni, NeMo RL, PettingLLMs, Flow-Factory, TRL, the scripts of diffusers, ai-toolkit and
# kohya's sd-scripts; `docs/migrate` shows the most used ones side by side. Their values are in `other_values`.

# ruff: noqa: E501 - a row is a line


# gerl's key, or several that take the same value: the other names, from the end of which on they are read
# (`optim.lr` is also `actor_rollout_ref.actor.optim.lr`)
NAMES = {
    "experiment": "config config_name config_file recipe",
    "hydra.run.dir": """output_dir outdir out out_dir run_dir logdir logging_dir save_dir default_local_dir checkpoint_dir
        run_name experiment_name exp_name output_name training_folder log_dir""",
    "algorithm": "trainer_type loss_mode loss_type model.algorithm rl_algorithm algorithm_type",
    # model
    "model.path": """pretrained.model pretrained.model_path pretrained_model pretrained_model_name_or_path
        model_name_or_path model_name model_id base_model model.name name_or_path model_path base_model_path""",
    "model.dtype": """mixed_precision model_dtype torch_dtype param_dtype weight_dtype precision fp16 bf16
        train.dtype""",
    "model.train": "finetune_type use_lora use_peft lora.enabled",
    "model.lora_rank": "lora_r lora.r lora.rank network.linear network_dim network.dim network.rank",
    "model.lora_alpha": "lora.alpha network.linear_alpha network_alpha network.alpha",
    "model.lora_targets": "lora_target_modules target_modules lora_layers",
    "model.lora": "lora_path lora_adapter_path adapter_path adapter_name_or_path pretrained_lora network_weights",
    "model.quantize": "load_in_8bit load_in_4bit bnb_4bit_quant_type quantization fp8_base",
    "model.gradient_checkpointing": """enable_gradient_checkpointing activation_checkpointing
        use_gradient_checkpointing""",
    "model.attention": "attn_backend rollout_attn_backend attn_implementation attention_backend xformers sdpa",
    "model.offload": "param_offload cpu_offload enable_model_cpu_offload enable_sequential_cpu_offload low_vram lowvram",
    "model.shard": "sharding_strategy fsdp strategy actor.strategy dtensor_cfg.enabled",
    "model.compile": "torch_compile use_torch_compile",
    # sampling
    "sampling.height sampling.width": "resolution image_size",
    "sampling.height": "image_height pipeline.height sample.height",
    "sampling.width": "image_width pipeline.width sample.width",
    "sampling.num_inference_steps": """sample.num_steps sample_num_steps sampling_steps sampling.num_steps
        sampling.steps num_sampling_steps train.num_inference_steps rollout.num_inference_steps
        pipeline.num_inference_steps sample.sample_steps""",
    "sampling.guidance_scale": """sample_guidance_scale sample.guidance_scale train.guidance_scale cfg_scale
        rollout.guidance_scale pipeline.guidance_scale""",
    "sampling.call.true_cfg_scale": "true_cfg_scale",
    "sampling.call.max_sequence_length": "max_sequence_length max_prompt_length prompt_length max_token_length",
    "sampling.call.negative_prompt": "negative_prompt negative_prompts sample.neg",
    "sampling.call.num_frames": "num_frames",
    "sampling.kernel": "sde_type dynamics_type",
    "sampling.noise_level": """eta sample_eta sample.noise_level scheduler.noise_level algo.noise_level
        rollout.noise_level""",
    "sampling.window_size": "sde_window_size num_sde_steps",
    "sampling.window_range": "sde_window_range sde_steps timestep_range",
    "sampling.window_schedule": "sample_strategy",
    "sampling.window_every": "iters_per_group",
    "sampling.same_init_noise": "same_latent init_same_noise",
    # rollout
    "rollout.prompts_per_step": """data.train_batch_size num_prompts_per_step unique_sample_num_per_epoch
        prompts_per_batch num_batches_per_epoch sample.num_batches_per_epoch sample_num_batches_per_epoch
        generation_batch_size
        rollout_batch_size train_sample_num""",
    "rollout.n": """num_generations num_generations_per_prompt num_image_per_prompt num_images_per_prompt group_size
        n_samples_per_prompt num_samples_per_prompt images_per_prompt""",
    "rollout.micro_batch_size": """per_device_train_batch_size per_device_batch_size train_batch_size
        sample_batch_size sample.train_batch_size sample.batch_size log_prob_micro_batch_size
        log_prob_micro_batch_size_per_gpu max_num_seqs logprob_batch_size""",
    # algorithm
    "algorithm.adv_estimator": """advantage_estimator advantage_aggregation multi_objective_aggregation
        use_leave_one_out_baseline leave_one_out""",
    "algorithm.advantage_std": """global_std sample.global_std normalize_rewards scale_rewards normalize_advantages
        norm_adv_by_std_in_grpo""",
    "algorithm.advantage_clip": "adv_clip_max train_adv_clip_max adv_clip_range adv_clip clip_max",
    "algorithm.clip_low algorithm.clip_high": """clip_range train_clip_range clip_ratio cliprange clip_eps epsilon
        ppo_clip_range""",
    "algorithm.clip_low": "clip_ratio_low clip_range_lt ratio_clip_min epsilon_low",
    "algorithm.clip_high": "clip_ratio_high clip_range_gt ratio_clip_max epsilon_high",
    "algorithm.kl_coef": """beta train.beta kl_loss_coef kl_beta kl_penalty kl_coeff kl_weight use_kl_loss ref_kl_coef
        reference_policy_kl_penalty""",
    "algorithm.kl_type": "train.kl_type kl_loss_type reference_policy_kl_type",
    "algorithm.kl_in_reward": "use_kl_in_reward",
    "algorithm.cfg": "train.cfg train_cfg detach_uncond",
    "algorithm.timestep_fraction": "train.timestep_fraction train_timestep_fraction",
    "algorithm.timesteps": "num_train_timesteps",
    "algorithm.history": "per_prompt_stat_tracking per_prompt_stat_tracking_buffer_size",
    "algorithm.dynamic_sampling": """use_dynamic_sampling dynamic_sampling_max_gen_batches filter_groups
        filter_groups.enable filter_groups.max_num_gen_batches""",
    "algorithm.mix": "nft_beta mix_beta crd_beta",
    "algorithm.regression": "crd_loss_type",
    "algorithm.kl_by_reward": "reward_adaptive_kl",
    "algorithm.beta": "dpo_beta beta_dpo",
    "algorithm.weighting": "awm_weighting",
    "algorithm.kl_threshold": "kl_mask_threshold",
    "algorithm.teachers": "teacher_model.model_path teacher_path teacher_model_path distillation.enabled",
    # actor
    "actor.lr": "learning_rate train_learning_rate optim.lr optimizer.lr train.lr unet_lr",
    "actor.lr_schedule": "lr_scheduler lr_scheduler_type",
    "actor.warmup_steps": "lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "actor.optimizer": "optim use_8bit_adam train_use_8bit_adam optimizer_type train.optimizer optimizer",
    "actor.betas": "adam_betas adam_beta1 adam_beta2 train_adam_beta1 train_adam_beta2",
    "actor.eps": "adam_epsilon train_adam_epsilon",
    "actor.weight_decay": "adam_weight_decay train_adam_weight_decay optim.weight_decay",
    "actor.max_grad_norm": """grad_clip clip_grad train.max_grad_norm train_max_grad_norm policy.max_grad_norm
        gradient_clipping gradient_clip_val""",
    "actor.updates_per_step": """ppo_mini_batch_size mini_batch_size gradient_accumulation_steps
        gradient_step_per_epoch train_gradient_accumulation_steps train.gradient_accumulation_steps steps_per_generation
        train_global_batch_size""",
    "actor.epochs": "num_iterations ppo_epochs num_inner_epochs train_num_inner_epochs",
    "actor.micro_batch_size": """ppo_micro_batch_size ppo_micro_batch_size_per_gpu train.batch_size
        train_micro_batch_size""",
    "actor.ema_decay": "ema train.ema use_ema ema_rate ema_config.ema_decay",
    # reward
    "reward.scorers": """reward_fn reward_funcs reward_model rewards reward_function custom_reward_function
        reward_model_path reward_model.model_path reward_model.path reward.components""",
    "reward.scorers.NAME.path": "custom_reward_function.path reward_function_path",
    "reward.scorers.NAME.function": "custom_reward_function.name reward_function_name",
    "reward.scorers.NAME.weight": "reward_weights",
    # data and validation
    "data.train": """train_files train_file train_data train_data_path dataset dataset_dir dataset_name data.path
        prompt_file prompts folder_path train_data_dir dataset_config""",
    "data.shuffle": "shuffle_dataset",
    "validation.data": "val_files val_file val_data validation_file eval_dataset eval_file test_file sample_prompts sample.prompts",
    "validation.every": """test_freq eval_freq val_freq eval_steps val_period eval_every eval_interval
        validation_steps sample_every sample_every_n_steps""",
    "validation.max_prompts": "val_max_samples max_val_samples max_eval_samples",
    "validation.images": "log_val_generations num_val_samples_to_print num_completions_to_print log_completions",
    "validation.micro_batch_size": """val_batch_size test_batch_size per_device_eval_batch_size
        eval.per_device_batch_size eval_batch_size""",
    "validation.num_inference_steps": """eval_num_steps val_kwargs.num_inference_steps
        val_kwargs.pipeline.num_inference_steps eval.num_inference_steps""",
    "validation.guidance_scale": """eval_guidance_scale val_kwargs.guidance_scale val_kwargs.pipeline.guidance_scale
        eval.guidance_scale""",
    # checkpoint
    "checkpoint.every": """save_freq save_steps save_period save_interval save_every checkpointing_steps
        save_every_n_steps checkpointing.enabled""",
    "checkpoint.keep": """num_checkpoint_limit save_total_limit max_actor_ckpt_to_keep checkpoints_total_limit
        keep_top_k keep_last max_step_saves_to_keep save_last_n_steps""",
    "checkpoint.resume": "resume_from resume_mode resume_path resume_from_path resume_from_checkpoint",
    # cluster
    "cluster.num_workers": """n_gpus_per_node gpus_per_node num_gpus num_processes nproc_per_node nnodes num_nodes
        ngpu""",
    "cluster.layout": "hybrid_engine colocate colocated.enabled",
    "cluster.actor_workers": "actor_gpus actor_num_gpus",
    "cluster.rollout_workers": "rollout_gpus rollout_num_gpus",
    "cluster.ranks_per_worker": "fsdp_size tensor_model_parallel_size tensor_parallel_size",
    "cluster.context": "ulysses_sequence_parallel_size sequence_parallel_size context_parallel_size sp_size",
    # logger
    "logger.trackers": "report_to log_with logging_backend trainer.logger logger wandb_enabled",
    "logger.project": "project_name tracker_project_name",
    # trainer
    "trainer.steps": """total_epochs max_epochs num_epochs num_train_epochs max_num_epochs total_training_steps
        max_steps max_train_steps max_num_steps train.steps num_steps max_train_epochs""",
    "trainer.staleness": """max_staleness max_trajectory_age_steps async_weight_update staleness_threshold
        async_strategy async_grpo.enabled""",
    "trainer.seed": "seed random_seed",
}  # fmt: skip
EDIT = "a prompt is sampled once, and its image is not edited again"
SIZE = "an image has sampling.height, sampling.width and sampling.num_inference_steps"
ENGINE = "the diffusers pipeline that trains also samples, so the log-probabilities are its own"
SERVER = "there is no server with a token cache; memory is set by rollout.micro_batch_size and model.offload"
AGENTS = "a run trains one model that acts once per image; there are no agents, roles or turns"
NOISE = "an image has no tokens to sample; exploration is set by sampling.noise_level and sampling.kernel"
SHARDS = "how weights are gathered is fixed; set model.shard, cluster.ranks_per_worker and model.offload"
CAPTIONS = "training images and captions are not read; images are sampled from prompts"
# blocks of other programs that have nothing here, whichever key of them is given
BLOCKS = {
    "critic": "no value network is trained; the baseline is set by algorithm.adv_estimator",
    "env": "rewards come from scorers: reward.scorers.NAME, with replicas=N for more processes",
    "multi_turn": EDIT,
    "megatron": "diffusers denoisers have no Megatron version; use model.shard and cluster.context",
    "megatron_cfg": "diffusers denoisers have no Megatron version; use model.shard and cluster.context",
    "agent_policy_configs": AGENTS,
    "multi_agent_interaction": AGENTS,
    "reward_scaling": "set reward.scorers.NAME.scale, .offset and .clip",
    "vllm_cfg": ENGINE, "sglang_cfg": ENGINE, "vllm_kwargs": ENGINE, "engine_kwargs": ENGINE,
}  # fmt: skip
# what gerl has no key for, and why, by the end of the name
ABSENT = {
    "gamma": "an image has one reward, at its end; steps are weighted by algorithm.timestep_weights",
    "lam": "without a value network there is nothing to average over; the baseline is set by algorithm.adv_estimator",
    **dict.fromkeys(("lora_dropout", "lora.dropout", "network_dropout", "network.dropout"),
                    "with dropout the update would not compute the log-probabilities of the rollout"),
    **dict.fromkeys(("max_response_length", "max_completion_length"), SIZE),
    **dict.fromkeys(("max_turns", "max_rollout_turns"), EDIT),
    **dict.fromkeys(("temperature", "top_p", "top_k"), NOISE),
    **dict.fromkeys(("rollout.name", "generation.backend", "rollout.backend", "model.backend", "use_vllm", "vllm_mode"), ENGINE),
    **dict.fromkeys(("gpu_memory_utilization", "tp_size", "mem_fraction_static", "context_length", "max_model_len",
                     "free_cache_engine", "vllm_gpu_memory_utilization"), SERVER),
    "enforce_eager": "the model runs eagerly; model.compile=inductor compiles it",
    **dict.fromkeys(("offload_policy", "reshard_after_forward", "optimizer_offload", "wrap_policy"), SHARDS),
    "pipeline_model_parallel_size": "layers are not divided among GPUs; use model.shard and cluster.context",
    "enable_vision": "every scorer sees the images; there is nothing to enable",
    "loss_agg_mode": "the loss is the mean over images and steps, whatever the micro-batch",
    **dict.fromkeys(("val_at_start", "val_before_train", "eval_on_start"),
                    "validation runs at the start and the end, unless validation.data=null"),
    **dict.fromkeys(("stop_at_validation_reward", "stop_at_validation_accuracy", "stop_at_validation"),
                    "a loop over gerl.Trainer in Python can end when step.held_out is good enough"),
    "batch_multiplier": "further prompts are sampled if groups have equal rewards: algorithm.dynamic_sampling",
    "in_flight_weight_updates": "weights do not change during a rollout; trainer.staleness=N samples N steps ahead",
    "skip_reference_policy_logprobs_calculation": "with algorithm.kl_coef=0 there is no reference pass",
    "seq_logprob_error_threshold": "actor.max_ratio_deviation bounds the ratio before the first update of a step",
    **dict.fromkeys(("higher_is_better", "metric_name", "metric_for_best_model", "greater_is_better"),
                    "the best checkpoint is the one with the highest held-out reward"),
    **dict.fromkeys(("specialization", "lora_num", "num_agents"), AGENTS),
    "if_mix_rewards": "scorers are weighted by reward.scorers.NAME.weight",
    "num_episodes": "each held-out prompt is sampled validation.images_per_prompt times, images=N in gerl.evaluate",
    **dict.fromkeys(("noise_scheduler", "network_module", "network.type", "job", "process", "model.is_flux", "model.arch",
                     "model_type", "is_xl", "sdxl", "v2", "v_parameterization", "timestep_sampling", "timestep_type",
                     "discrete_flow_shift"), "model.path determines the pipeline and its scheduler"),
    **dict.fromkeys(("train_unet", "train_text_encoder", "text_encoder_lr", "network_train_unet_only"),
                    "the denoiser is trained, text encoders are not"),
    **dict.fromkeys(("caption_ext", "caption_extension", "caption_dropout_rate", "shuffle_tokens", "shuffle_caption",
                     "keep_tokens", "trigger_word", "cache_latents", "cache_latents_to_disk", "enable_bucket",
                     "min_snr_gamma", "noise_offset", "clip_skip", "reg_data_dir"), CAPTIONS),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio"), "actor.warmup_steps is a number of optimizer steps"),
    **dict.fromkeys(("max_data_loader_n_workers", "dataloader_num_workers"), "prompts are read by the trainer itself"),
    **dict.fromkeys(("save_model_as", "save.dtype"), "gerl export writes other formats, such as format=kohya"),
    "save_every_n_epochs": "checkpoint.every counts trainer steps",
    "sample_every_n_epochs": "validation.every counts trainer steps",
    "sampler": "the pipeline's scheduler samples; sampling.kernel sets how its steps explore",
    "walk_seed": "held-out images have the same noise in every validation",
    "push_to_hub": "gerl export push=owner/name does it after the run",
}  # fmt: skip
MEANING = {other: key for key, others in NAMES.items() for other in others.split()}
FREE = ("sampling.call.", "reward.scorers.")  # dictionaries: their entries are not gerl's to name


def ends(name: str) -> list[str]:
    """The name, and what is left of it without its first parts."""
    parts = name.lower().split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def known_as(name: str) -> str | None:
    """The longest end of `name` that the tables have; None: they have none."""
    return next((end for end in ends(name) if end in MEANING or end in ABSENT), None)


def elsewhere(name: str, keys: Collection[str] = ()) -> str | None:
    """gerl's key for what other programs call `name`; several, separated by a space, where its value is theirs too.

    The longest end of `name` counts that is known, or is one of gerl's `keys`: `actor_rollout_ref.rollout.n` is
    `rollout.n`. None: it is not known.
    """
    if name.startswith(FREE) or absent(name):
        return None
    known = (end if end in keys else MEANING.get(end) for end in ends(name))
    return next((key for key in known if key), None)


def absent(name: str) -> str | None:
    """Why gerl has nothing like `name` of other programs; None: nothing is known of it."""
    if name.startswith(FREE):
        return None
    parts = name.lower().split(".")
    if block := next((part for part in (*parts[:-1], name.lower()) if part in BLOCKS), None):
        return BLOCKS[block]
    end = known_as(name)
    return ABSENT.get(end) if end else None


# --- Values of other programs, and gerl's for the same, or why there is none. Tables, for hints only; see `elsewhere`.

# ruff: noqa: E501 - a row is a line


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
