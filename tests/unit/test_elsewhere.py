"""Names of other programs: the key of gerl that a hint has in their place."""

import pytest
from tables import each

from gerl.commandline.composition import CHOICES
from gerl.config import did_you_mean, is_foreign, keys, nearest_key, other_name
from gerl.config.other_programs import ABSENT, MEANING, NAMES, absent, elsewhere
from gerl.config.registry import ALGORITHMS

KNOWN = {name for name, _ in keys()}

GIVEN = {
    # flow_grpo
    "config.sample.num_steps": "sampling.num_inference_steps",
    "sample.train_batch_size": "rollout.micro_batch_size",
    "train.batch_size": "actor.micro_batch_size",
    "train.beta": "algorithm.kl_coef",
    "train.ema": "actor.ema_decay",
    # MM-GRPO, verl, verl-omni
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "rollout.n",
    "actor_rollout_ref.rollout.algo.sde_window_range": "sampling.window_range",
    "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps": "validation.num_inference_steps",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "actor.updates_per_step",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.val_files": "validation.data",
    "trainer.test_freq": "validation.every",
    "trainer.default_local_dir": "hydra.run.dir",
    "custom_reward_function.path": "reward.scorers.NAME.path",
    # Flow-Factory
    "train.unique_sample_num_per_epoch": "rollout.prompts_per_step",
    "scheduler.dynamics_type": "sampling.kernel",
    "scheduler.noise_level": "sampling.noise_level",
    "eval.num_inference_steps": "validation.num_inference_steps",
    # TRL and diffusers
    "learning_rate": "actor.lr",
    "per_device_train_batch_size": "rollout.micro_batch_size",
    "num_generations": "rollout.n",
    "beta": "algorithm.kl_coef",
    "lora_r": "model.lora_rank",
    "model.lora_r": "model.lora_rank",
    # NeMo RL
    "policy.model_name": "model.path",
    "grpo.max_num_steps": "trainer.steps",
    "checkpointing.save_period": "checkpoint.every",
}


@each("name", GIVEN)
def test_a_name_of_another_program(name: str) -> None:
    assert nearest_key(name) == other_name(name) == GIVEN[name]
    assert did_you_mean(name) == f", did you mean {GIVEN[name]!r}"


def test_what_is_meant_exists() -> None:
    choices = {*CHOICES, "hydra.run.dir"}
    missing = {key for keys in NAMES for key in keys.split() if key not in KNOWN | choices}
    assert all(key.startswith("sampling.call.") for key in missing), missing


def test_names_mean_one_thing_and_are_none_of_gerls() -> None:
    names = [other for others in NAMES.values() for other in others.split()]
    assert len(set(names)) == len(names) == len(MEANING) > 250
    assert not set(names) & KNOWN and not set(names) & set(ABSENT)
    assert not [known for known in KNOWN if is_foreign(known)]


def test_one_value_for_two_keys() -> None:
    assert nearest_key("clip_range") == "algorithm.clip_low algorithm.clip_high"
    assert did_you_mean("actor.clip_ratio") == ", did you mean 'algorithm.clip_low' and 'algorithm.clip_high'"


@pytest.mark.parametrize("name", ["critic.model.path", "vf_coef", "actor_rollout_ref.rollout.multi_turn.enable"])
def test_what_there_is_none_of_has_a_reason(name: str) -> None:
    assert (reason := absent(name)) and did_you_mean(name) == f": {reason}"
    assert elsewhere(name) is None and other_name(name) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("trainer.stepz", "trainer.steps"),
        ("chekpoint.every", "checkpoint.every"),
        ("validaton.every", "validation.every"),
        ("seed", "trainer.seed"),
        ("data.prompts_key", "data.prompt_key"),
        ("reward.scorers.mine.wieght", "reward.scorers.mine.weight"),
    ],
)
def test_a_slip_of_the_pen_stays_one(name: str, near: str) -> None:
    assert nearest_key(name) == near


@each("name", ["reward.scorers.mine.kwargs.model_path", "sampling.call.resolution", "zebra", *sorted(KNOWN)])
def test_what_is_no_name_of_another_program(name: str) -> None:
    assert other_name(name) is None


def test_a_key_that_the_algorithm_does_not_read_is_not_suggested() -> None:
    assert nearest_key("algorithm.clip_range", ALGORITHMS["diffusion_nft"].config_class) is None
    assert (
        nearest_key("algorithm.clip_range", ALGORITHMS["flow_grpo"].config_class)
        == "algorithm.clip_low algorithm.clip_high"
    )
