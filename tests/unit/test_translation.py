# ruff: noqa: E501 - a row is a line
"""Keys of other programs with their values: what gerl writes means the same, composes, or has a VALUE and a reason."""

import re
import shlex
from typing import Any

import pytest
from tables import each

from gerl.commandline.composition import compose_run
from gerl.config import answered, is_foreign, keys, readers
from gerl.config.other_programs import ABSENT, BLOCKS, FLAGS, MEANING, RULES, VALUES, Why
from gerl.config.reading import advice, refusal, typed
from gerl.config.suggestions import OPEN
from gerl.errors import ConfigError

FIELDS = dict(keys())
SAMPLES = ["true", "false", "7", "0.5", "[1,2]", "none", "text", "-1", "{a: 1}", "a/b"]
SMALL = ["experiment=plain", "algorithm=flow_grpo", "rollout.micro_batch_size=64"]  # those programs train by GRPO


def written(line: str) -> tuple[str, str]:
    """The arguments that gerl writes for a command line, and the whole sentence."""
    given = dict(argument.split("=", 1) for argument in shlex.split(line))
    foreign = {name: value for name, value in given.items() if is_foreign(name)}
    own = {name: value for name, value in given.items() if name not in foreign}
    return typed(answered(foreign, own).written), refusal(foreign, own)


# what is typed, what is written, and a word of the reason
MEANT = [
    # verl, MM-GRPO, verl-omni
    ("actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.04", "algorithm.kl_coef=0.04", "remove"),
    ("actor_rollout_ref.actor.use_kl_loss=true", "algorithm.kl_coef=VALUE", "kl_loss_coef"),
    ("use_kl_loss=false kl_loss_coef=0.04", "algorithm.kl_coef=0", ""),
    ("actor.ppo_mini_batch_size=64 data.train_batch_size=256", "actor.updates_per_step=4 rollout.prompts_per_step=256", ""),
    ("ppo_mini_batch_size=64", "actor.updates_per_step=VALUE", "prompts of a step / 64"),
    ("trainer.n_gpus_per_node=8 trainer.nnodes=1", "cluster.num_workers=8", ""),
    ("trainer.n_gpus_per_node=8 trainer.nnodes=2", "cluster.num_workers=16", ""),
    ("nnodes=2", "cluster.num_workers=VALUE", "2 machines"),
    ("trainer.total_epochs=15", "trainer.epochs=15 trainer.steps=1000000", ""),
    ("trainer.total_epochs=15 trainer.total_training_steps=300", "trainer.epochs=15 trainer.steps=300", ""),
    ("reward_model.path=RM", "reward.scorers=VALUE", "a reward model is a scorer"),
    ("reward.reward_model.model_path=RM", "reward.scorers=VALUE", "a reward model is a scorer"),
    ("actor_rollout_ref.rollout.name=vllm", "", "the diffusers pipeline"),
    ("rollout.temperature=0.7 rollout.top_p=0.95", "", "sampling.noise_level"),
    ("custom_reward_function.path=F.py", "'reward.scorers={mine: {path: F.py}}'", ""),
    ("custom_reward_function.path=F.py custom_reward_function.name=f", "'reward.scorers={mine: {path: F.py, function: f}}'", ""),
    ("clip_ratio=0.2", "", "remove it"),
    ("actor.clip_ratio=1e-4", "algorithm.clip_low=1e-4 algorithm.clip_high=1e-4", ""),
    ("actor.kl_loss_type=low_var_kl", "algorithm.kl_type=k3", "flow_grpo"),
    ("algorithm.kl_penalty=kl algorithm.use_kl_in_reward=true", "algorithm.kl_type=k1 algorithm.kl_in_reward=true", "flow_grpo"),
    ("algorithm.kl_penalty=kl", "", "remove"),
    ("actor.kl_loss_type=kl", "algorithm.kl_type=VALUE", "no gradient"),
    ("rollout.sde_type=sde", "sampling.kernel=flow_sde", ""),
    ("rollout.algo.sde_type=cps", "sampling.kernel=cps", ""),
    ("rollout.sde_window_range='(0, 5)'", "'sampling.window_range=[0,5]'", ""),
    ("actor.strategy=fsdp2", "", "model.shard=all and cluster.ranks_per_worker=N"),
    ("actor.strategy=fsdp2 fsdp_config.fsdp_size=8", "model.shard=all cluster.ranks_per_worker=8", ""),
    ("fsdp_config.sharding_strategy=SHARD_GRAD_OP fsdp_config.fsdp_size=8", "model.shard=all model.reshard=false "
     "cluster.ranks_per_worker=8", ""),
    ("fsdp_config.reshard_after_forward=false", "", "model.shard=denoiser or all"),
    ("fsdp_config.reshard_after_forward=true", "model.reshard=true", ""),
    ("actor.strategy=fsdp2 fsdp_config.fsdp_size=8 fsdp_config.reshard_after_forward=false",
     "model.shard=all cluster.ranks_per_worker=8 model.reshard=false", ""),
    ("fsdp_config.mixed_precision.reduce_dtype=fp32", "model.reduce_dtype=float32", ""),
    ("mixed_precision.reduce_dtype=fp16", "model.reduce_dtype=VALUE", "overflow"),
    ("gamma=0.95", "algorithm.timestep_weights=discount algorithm.gamma=0.95", ""),
    ("gamma=1.0", "", ""),
    ("log_level=DEBUG", "logger.level=debug", ""),
    ("verbose=true", "logger.level=debug", ""),
    ("trainer.logger='[console,wandb]'", "'logger.trackers=[wandb]'", ""),
    ("trainer.test_freq=-1", "validation.data=null", ""),
    ("trainer.save_freq=-1", "checkpoint.every=0", ""),
    ("trainer.resume_mode=disable", "checkpoint.resume=never", ""),
    ("trainer.experiment_name=first", "hydra.run.dir=outputs/first", ""),
    ("trainer.experiment_name=first trainer.default_local_dir=d", "hydra.run.dir=d", "remove"),
    ("async_strategy=one-step-off", "trainer.staleness=1", ""),
    ("hybrid_engine=true", "cluster.layout=hybrid", ""),
    ("actor.loss_mode=distill_kl", "algorithm=opd", ""),
    ("data.max_prompt_length=1024", "sampling.call.max_sequence_length=VALUE", "tokens"),
    ("data.custom_cls.path=mine.py data.custom_cls.name=Words", "data.train=mine.py:Words", ""),
    ("data.custom_cls.name=Words", "data.train=VALUE", "FILE.py:NAME"),
    ("filter_groups.enable=true filter_groups.max_num_gen_batches=3", "algorithm.dynamic_sampling=3", ""),
    ("trainer_type=ppo critic.optim.lr=1e-5 trainer.critic_warmup=10",
     "algorithm=flow_ppo critic.lr=1e-5 critic.warmup_steps=10", ""),
    ("critic.model.path=x", "", "features of the denoiser"),
    # flow_grpo
    ("train.gradient_accumulation_steps=6 sample.num_batches_per_epoch=12", "actor.updates_per_step=2 rollout.prompts_per_step=VALUE", "12 batches"),
    ("sample.num_batches_per_epoch=12 sample.train_batch_size=8 sample.num_image_per_prompt=24 num_processes=8",
     "rollout.prompts_per_step=32 rollout.micro_batch_size=8 rollout.n=24 cluster.num_workers=8", ""),
    ("train.ema=True", "actor.ema_decay=0.9", ""),
    ("per_prompt_stat_tracking=True", "algorithm.history=0", "flow_grpo"),
    ("train.timestep_fraction=0.99", "algorithm.timestep_fraction=1", "flow_grpo"),
    ("train.cfg=True", "algorithm.cfg=detach_uncond", ""),
    ("sample.global_std=True", "algorithm.advantage_std=batch", ""),
    ("use_lora=True", "model.train=lora", ""),
    ("mixed_precision=bf16", "model.dtype=bfloat16", ""),
    ("train.adam_beta1=0.9 train.adam_beta2=0.99", "'actor.betas=[0.9,0.99]'", ""),
    ("train.use_8bit_adam=True", "actor.optimizer=adamw8bit", ""),
    ("reward_fn='{ocr: 1.0}'", "'reward.scorers={ocr: {weight: 1.0}}'", ""),
    ("dataset=dataset/ocr", "data.train=VALUE", "train.txt"),
    ("num_epochs=100", "trainer.steps=100", ""),
    # Flow-Factory
    ("scheduler.dynamics_type=Flow-SDE", "sampling.kernel=flow_sde", ""),
    ("train.trainer_type=grpo", "algorithm=flow_grpo", ""),
    ("train.trainer_type=nft", "algorithm=diffusion_nft", ""),
    ("train.trainer_type=dpo", "algorithm=diffusion_dpo", ""),
    ("train.kl_type=v-based", "algorithm.kl_type=velocity", ""),
    ("train.kl_type=x-based", "algorithm.kl_type=VALUE", "gaussian"),
    ("train.timestep_range='[0,0.6]'", "sampling.window_range=VALUE", "in steps"),
    ("scheduler.sde_steps='[1,2,3]'", "'sampling.window_range=[1,4]'", ""),
    # TRL and diffusers
    ("gradient_accumulation_steps=8", "", "automatically"),
    ("steps_per_generation=8 gradient_accumulation_steps=4", "actor.updates_per_step=2", ""),
    ("generation_batch_size=64 num_generations=8", "rollout.prompts_per_step=8 rollout.n=8", ""),
    ("epsilon=0.2", "", "remove it"),
    ("num_train_epochs=3.0", "trainer.epochs=3 trainer.steps=1000000", ""),
    ("num_train_epochs=0.5", "trainer.epochs=VALUE", "an integer"),
    ("bf16=true", "model.dtype=bfloat16", ""),
    ("bf16=false", "", "remove bf16"),
    ("load_in_4bit=true", "model.quantize=nf4", ""),
    ("torch_compile=true", "model.compile=inductor", ""),
    ("report_to=wandb", "'logger.trackers=[wandb]'", ""),
    ("report_to=none", "'logger.trackers=[]'", ""),
    ("lora_target_modules='[to_q,to_k]'", "'model.lora_targets=to_q|to_k'", ""),
    ("lr_scheduler_type=constant_with_warmup", "actor.lr_schedule=constant", ""),
    ("scale_rewards=false", "algorithm.advantage_std=none", ""),
    ("loss_type=dr_grpo", "algorithm.advantage_std=none", ""),
    ("attn_implementation=flash_attention_2", "model.attention=flash", ""),
    ("eval_steps=0.1", "validation.every=VALUE", "trainer steps"),
    # NeMo RL and PettingLLMs
    ("policy.train_global_batch_size=512 grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=16",
     "actor.updates_per_step=1 rollout.prompts_per_step=32 rollout.n=16", ""),
    ("grpo.use_leave_one_out_baseline=true", "algorithm.adv_estimator=rloo", ""),
    ("env.math.num_workers=8", "", "reward.scorers.NAME"),
    ("env.name=math", "", "scorer"),
    ("grpo.stop_at_validation_reward=0.9", "'trainer.stop_at={metric: val/reward/mean, above: 0.9}'", ""),
    ("stop_at_validation_accuracy=0.9", "trainer.stop_at=VALUE", "success_rate"),
    ("checkpointing.checkpoint_must_save_by=00:03:45:00", "trainer.hours=3.75", ""),
    ("max_time_per_run=10:00:00", "trainer.hours=10.0", ""),
    ("checkpointing.metric_name=x", "checkpoint.best=VALUE", "held-out reward"),
    ("checkpointing.metric_name=val/ocr/mean checkpointing.higher_is_better=true", "checkpoint.best=val/ocr/mean", "a minus"),
    ("metric_for_best_model=val/lpips/mean greater_is_better=false", "checkpoint.best=-val/lpips/mean", ""),
    ("checkpointing.enabled=false", "checkpoint.every=0", ""),
    ("num_iterations=4", "actor.epochs=4", ""),
    ("num_iterations=4 config_name=x", "trainer.steps=4 experiment=VALUE", "gerl recipes"),
    # ai-toolkit and kohya
    ("network.linear=16 network.linear_alpha=16", "model.lora_rank=16 model.lora_alpha=16", ""),
    ("network_dim=16 network_alpha=8", "model.lora_rank=16 model.lora_alpha=8", ""),
    ("optimizer_type=AdamW8bit", "actor.optimizer=adamw8bit", ""),
    ("optimizer_type=Prodigy", "actor.optimizer=VALUE", "AdamW"),
    ("resolution=512", "sampling.height=512 sampling.width=512", ""),
    ("resolution=512,768", "sampling.height=768 sampling.width=512", ""),
    ("max_train_steps=100 save_every_n_steps=10 output_dir=o", "trainer.steps=100 checkpoint.every=10 hydra.run.dir=o", ""),
    ("pretrained_model_name_or_path=a/b", "model.path=a/b", ""),
    ("train.lr=1e-4 train.steps=100 train.dtype=bf16", "actor.lr=1e-4 trainer.steps=100 model.dtype=bfloat16", ""),
    ("ema_config.use_ema=true ema_config.ema_decay=0.99", "actor.ema_decay=0.99", ""),
]  # fmt: skip


@each(("line", "meant", "why"), MEANT)
def test_what_is_written_means_the_same(line: str, meant: str, why: str) -> None:
    given, message = written(line)
    assert given == meant and why in message


@each("line", [line for line, *_ in MEANT], every=20)
def test_what_is_written_composes_or_has_a_value_and_a_reason(line: str) -> None:
    arguments = shlex.split(written(line)[0])
    done = [argument for argument in arguments if not argument.endswith(f"={OPEN}")]
    keys_read = [a.partition("=")[0].partition(".")[2] for a in done if a.startswith("algorithm.")]
    chosen = [f"algorithm={readers(leaf)[0]}" for leaf in keys_read[:1] if "flow_grpo" not in readers(leaf)]
    small = [a for a in SMALL if a.partition("=")[0] not in {d.partition("=")[0] for d in (*chosen, *done)}]
    if "algorithm=opd" in done:
        small.append("algorithm.teachers=[{guidance: 3}]")
    compose_run([*small, *chosen, *done])


NAMES = [*MEANING, *ABSENT, *(f"{block}.x" for block in BLOCKS)]


@each("name", NAMES, every=50)
def test_no_name_has_a_wrong_answer(name: str) -> None:
    """Whatever the value: no number from true or false, no key twice, no NAME; a VALUE has a reason."""
    for value in SAMPLES:
        found = answered({name: value}, {})
        assert found.written or found.why or found.idle == [name]
        for key, meant in found.written.items():
            assert "NAME" not in key and "NAME" not in str(meant)
            if meant == OPEN:
                assert found.why
            elif key in FIELDS and not key.startswith("sampling.call."):
                number = {int, float} & {FIELDS[key].type, *getattr(FIELDS[key].type, "__args__", ())}
                assert not (number and str(meant).lower() in ("true", "false")), (name, value, key)


def test_two_names_of_one_key() -> None:
    assert written("learning_rate=1e-4 train.lr=1e-4")[0] == "actor.lr=1e-4"
    line, message = written("learning_rate=1e-4 train.lr=1e-5")
    assert line == "actor.lr=VALUE" and "learning_rate and train.lr mean the same" in message
    line, message = written("num_generations=8 rollout.n=4")
    assert line == "" and "rollout.n=4 is already given" in message


def test_the_tables_are_of_names_and_keys_that_there_are() -> None:
    assert not set(MEANING) & set(ABSENT)
    assert {*FLAGS, *RULES} <= set(MEANING)
    for key, values in VALUES.items():
        assert key in FIELDS or key == "algorithm"
        for theirs, ours in values.items():
            assert theirs == theirs.lower() and (isinstance(ours, Why) or ours != theirs), theirs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("algorithm=grpo", "'grpo' is flow_grpo here"),
        ("algorithm=nft", "diffusion_nft"),
        ("algorithm=dpo", "diffusion_dpo"),
        ("algorithm=dapo", "algorithm.dynamic_sampling"),
        ("algorithm=ppo", "flow_ppo"),
        ("algorithm=gae", "flow_ppo"),
        ("algorithm.adv_estimator=gae", "algorithm=flow_ppo"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "is reinforce_pp here"),
        ("model.dtype=bf16", "is bfloat16 here"),
        ("sampling.kernel=sde", "is flow_sde here"),
        ("actor.optimizer=prodigy", "AdamW"),
        ("validation.data=none", "validation.data=null"),
        ("validation.data=false", "validation.data=null"),
    ],
)
def test_a_value_of_another_program_is_known_in_its_refusal(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run([given])
    assert said in str(caught.value)


def test_a_file_of_another_program_is_answered_as_a_whole(tmp_path: Any) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "job: extension\nconfig:\n  process:\n  - network: {type: lora, linear: 16}\n    train: {lr: 1e-4, steps: 9}\n"
        "reward_fn: {ocr: 1.0}\n"
    )
    with pytest.raises(ConfigError) as caught:
        compose_run([f"experiment={file}"])
    message = str(caught.value)
    assert "write model.lora_rank=16 actor.lr=0.0001 trainer.steps=9 'reward.scorers={ocr: {weight: 1.0}}'" in message
    assert re.search(r"job, .*: model\.path determines", message)


def test_the_same_reason_is_given_once() -> None:
    assert advice({"temperature": "1", "top_p": "1"}, {}).count("noise_level") == 1
