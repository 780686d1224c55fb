"""Names of settings in other programs, and gerl's keys for the same.

flow_grpo, MM-GRPO, verl, verl-omni, NeMo RL, Flow-Factory, TRL and the scripts of diffusers; `docs/coming_from.md`
shows the most used ones side by side. They are for hints only: a command line has gerl's own keys.
"""

from collections.abc import Collection

# gerl's key, or several that take the same value: the other names, from the end of which on they are read
# (`optim.lr` is also `actor_rollout_ref.actor.optim.lr`)
NAMES = {
    "experiment": "config config_name config_file recipe",
    "hydra.run.dir": """output_dir out out_dir run_dir logdir logging_dir save_dir default_local_dir checkpoint_dir
        run_name experiment_name exp_name""",
    "algorithm": "trainer_type loss_mode loss_type model.algorithm rl_algorithm",
    # model
    "model.path": """pretrained.model pretrained.model_path pretrained_model pretrained_model_name_or_path
        model_name_or_path model_name model_id base_model model.name""",
    "model.dtype": "mixed_precision model_dtype torch_dtype param_dtype weight_dtype precision fp16 bf16",
    "model.train": "finetune_type use_lora use_peft",
    "model.lora_rank": "lora_r lora.r lora.rank",
    "model.lora_alpha": "lora.alpha",
    "model.lora_targets": "lora_target_modules target_modules lora_layers",
    "model.lora": "lora_path lora_adapter_path adapter_path adapter_name_or_path pretrained_lora",
    "model.quantize": "load_in_8bit load_in_4bit bnb_4bit_quant_type quantization",
    "model.gradient_checkpointing": """enable_gradient_checkpointing activation_checkpointing
        use_gradient_checkpointing""",
    "model.attention": "attn_backend rollout_attn_backend attn_implementation attention_backend",
    "model.offload": "param_offload cpu_offload enable_model_cpu_offload enable_sequential_cpu_offload",
    "model.shard": "sharding_strategy fsdp actor.strategy",
    "model.compile": "torch_compile use_torch_compile",
    # sampling
    "sampling.height sampling.width": "resolution image_size",
    "sampling.height": "image_height pipeline.height",
    "sampling.width": "image_width pipeline.width",
    "sampling.num_inference_steps": """sample.num_steps sample_num_steps sampling_steps sampling.num_steps
        sampling.steps num_sampling_steps train.num_inference_steps rollout.num_inference_steps
        pipeline.num_inference_steps""",
    "sampling.guidance_scale": """sample_guidance_scale sample.guidance_scale train.guidance_scale cfg_scale
        rollout.guidance_scale pipeline.guidance_scale""",
    "sampling.call.true_cfg_scale": "true_cfg_scale",
    "sampling.call.max_sequence_length": "max_sequence_length max_prompt_length prompt_length",
    "sampling.call.negative_prompt": "negative_prompt negative_prompts",
    "sampling.call.num_frames": "num_frames",
    "sampling.kernel": "sde_type dynamics_type",
    "sampling.noise_level": """eta sample_eta sample.noise_level scheduler.noise_level algo.noise_level
        rollout.noise_level rollout.temperature rollout.top_p rollout.top_k""",
    "sampling.window_size": "sde_window_size num_sde_steps",
    "sampling.window_range": "sde_window_range sde_steps timestep_range",
    "sampling.window_schedule": "sample_strategy",
    "sampling.window_every": "iters_per_group",
    "sampling.same_init_noise": "same_latent init_same_noise",
    # rollout
    "rollout.prompts_per_step": """data.train_batch_size num_prompts_per_step unique_sample_num_per_epoch
        prompts_per_batch sample.num_batches_per_epoch sample_num_batches_per_epoch generation_batch_size
        rollout_batch_size""",
    "rollout.n": """num_generations num_generations_per_prompt num_image_per_prompt num_images_per_prompt group_size
        n_samples_per_prompt num_samples_per_prompt images_per_prompt""",
    "rollout.micro_batch_size": """per_device_train_batch_size per_device_batch_size train_batch_size
        sample_batch_size sample.train_batch_size sample.batch_size log_prob_micro_batch_size
        log_prob_micro_batch_size_per_gpu max_num_seqs""",
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
    "actor.lr": "learning_rate train_learning_rate optim.lr optimizer.lr",
    "actor.lr_schedule": "lr_scheduler lr_scheduler_type",
    "actor.warmup_steps": "lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "actor.optimizer": "optim use_8bit_adam train_use_8bit_adam",
    "actor.betas": "adam_betas adam_beta1 adam_beta2 train_adam_beta1 train_adam_beta2",
    "actor.eps": "adam_epsilon train_adam_epsilon",
    "actor.weight_decay": "adam_weight_decay train_adam_weight_decay optim.weight_decay",
    "actor.max_grad_norm": """grad_clip clip_grad train.max_grad_norm train_max_grad_norm policy.max_grad_norm
        gradient_clipping gradient_clip_val""",
    "actor.updates_per_step": """ppo_mini_batch_size mini_batch_size gradient_accumulation_steps
        gradient_step_per_epoch train_gradient_accumulation_steps steps_per_generation""",
    "actor.epochs": "num_iterations ppo_epochs num_inner_epochs train_num_inner_epochs",
    "actor.micro_batch_size": """ppo_micro_batch_size ppo_micro_batch_size_per_gpu train.batch_size
        train_micro_batch_size""",
    "actor.ema_decay": "ema train.ema use_ema ema_rate",
    # reward
    "reward.scorers": """reward_fn reward_funcs reward_model rewards reward_function custom_reward_function
        reward_model_path reward_model.model_path reward.components""",
    "reward.scorers.NAME.path": "custom_reward_function.path reward_function_path",
    "reward.scorers.NAME.function": "custom_reward_function.name reward_function_name",
    "reward.scorers.NAME.weight": "reward_weights",
    # data and validation
    "data.train": """train_files train_file train_data train_data_path dataset dataset_dir dataset_name data.path
        prompt_file prompts""",
    "data.shuffle": "shuffle_dataset",
    "validation.data": "val_files val_file val_data validation_file eval_dataset eval_file test_file",
    "validation.every": """test_freq eval_freq val_freq eval_steps val_period eval_every eval_interval
        validation_steps""",
    "validation.max_prompts": "val_max_samples max_val_samples max_eval_samples",
    "validation.images": "log_val_generations num_val_samples_to_print num_completions_to_print log_completions",
    "validation.micro_batch_size": """val_batch_size test_batch_size per_device_eval_batch_size
        eval.per_device_batch_size eval_batch_size""",
    "validation.num_inference_steps": """eval_num_steps val_kwargs.num_inference_steps
        val_kwargs.pipeline.num_inference_steps eval.num_inference_steps""",
    "validation.guidance_scale": """eval_guidance_scale val_kwargs.guidance_scale val_kwargs.pipeline.guidance_scale
        eval.guidance_scale""",
    # checkpoint
    "checkpoint.every": "save_freq save_steps save_period save_interval save_every checkpointing_steps",
    "checkpoint.keep": """num_checkpoint_limit save_total_limit max_actor_ckpt_to_keep checkpoints_total_limit
        keep_top_k keep_last""",
    "checkpoint.resume": "resume_from resume_mode resume_path resume_from_path resume_from_checkpoint",
    # cluster
    "cluster.num_workers": """n_gpus_per_node gpus_per_node num_gpus num_processes nproc_per_node nnodes num_nodes
        ngpu""",
    "cluster.layout": "hybrid_engine colocate",
    "cluster.actor_workers": "actor_gpus actor_num_gpus",
    "cluster.rollout_workers": "rollout_gpus rollout_num_gpus",
    "cluster.ranks_per_worker": "fsdp_size tensor_model_parallel_size tensor_parallel_size",
    "cluster.context": "ulysses_sequence_parallel_size sequence_parallel_size context_parallel_size sp_size",
    # logger
    "logger.trackers": "report_to log_with logging_backend trainer.logger",
    "logger.project": "project_name tracker_project_name",
    # trainer
    "trainer.steps": """total_epochs max_epochs num_epochs num_train_epochs max_num_epochs total_training_steps
        max_steps max_train_steps max_num_steps""",
    "trainer.staleness": """max_staleness max_trajectory_age_steps async_weight_update staleness_threshold
        async_strategy""",
    "trainer.seed": "seed random_seed",
}  # fmt: skip
# what gerl has no key for, and why
ABSENT = {
    "critic": "no value network is trained, the baseline is that of algorithm.adv_estimator",
    "gamma": "an image has one reward, at its end; steps are weighed by algorithm.timestep_weights",
    "lam": "without a value network there is nothing to average over; the baseline is that of algorithm.adv_estimator",
    "lora_dropout": "with dropout the update would not compute the log-probabilities of the rollout",
    "max_response_length": "an image has sampling.height, sampling.width and sampling.num_inference_steps",
    "max_completion_length": "an image has sampling.height, sampling.width and sampling.num_inference_steps",
    "multi_turn": "a prompt is drawn once, and its image is not edited again",
    "max_turns": "a prompt is drawn once, and its image is not edited again",
    "max_rollout_turns": "a prompt is drawn once, and its image is not edited again",
}
MEANING = {other: key for key, others in NAMES.items() for other in others.split()}
FREE = ("sampling.call.", "reward.scorers.")  # dictionaries: their entries are not gerl's to name


def elsewhere(name: str, keys: Collection[str] = ()) -> str | None:
    """gerl's key for what other programs call `name`; several, separated by a space, where its value is theirs too.

    The longest end of `name` counts that is known, or is one of gerl's `keys`: `actor_rollout_ref.rollout.n` is
    `rollout.n`. None: it is not known.
    """
    if name.startswith(FREE) or absent(name):
        return None
    parts = name.lower().split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    known = (end if end in keys else MEANING.get(end) for end in ends)
    return next((key for key in known if key), None)


def absent(name: str) -> str | None:
    """Why gerl has nothing like `name` of other programs; None: nothing is known of it."""
    return next((ABSENT[part] for part in name.lower().split(".") if part in ABSENT), None)
