"""The configuration: defaults are accepted, and each bad value is refused by its key, with the value and the remedy."""

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gerl.config import Config, did_you_mean, from_mapping, keys, readers
from gerl.config.algorithm import BY_NAME
from gerl.errors import ConfigError


def nested(**values: Any) -> dict[str, Any]:
    """`nested(actor__lr=1)` is `{"actor": {"lr": 1}}`."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *blocks, name = path.split("__")
        node = tree
        for block in blocks:
            node = node.setdefault(block, {})
        node[name] = value
    return tree


def test_the_defaults_are_accepted_and_survive_a_round_trip() -> None:
    assert from_mapping({}) == Config()
    assert from_mapping(dataclasses.asdict(Config())) == Config()


def test_values_that_are_given_arrive_typed() -> None:
    config = from_mapping(
        nested(
            actor__lr=1,
            sampling__window_range=[1, 5],
            sampling__window_size=3,
            reward__scorers={"mine": {"path": "a.py"}},
        )
    )
    assert config.actor.lr == 1.0 and isinstance(config.actor.lr, float)
    assert config.sampling.steps_range == (1, 5) and config.sampling.trained_steps == 3
    assert config.reward.scorers["mine"].path == "a.py" and config.reward.scorers["mine"].weight == 1.0


def test_a_window_of_all_steps_but_the_last_is_the_default() -> None:
    config = from_mapping(nested(sampling__num_inference_steps=6))
    assert config.sampling.steps_range == (0, 5) and config.sampling.trained_steps == 5


def test_the_configuration_is_frozen() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.actor.lr = 1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.actor = config.actor  # type: ignore[misc]


def test_defaults_are_not_shared_between_configurations() -> None:
    assert Config().actor.betas is not Config().actor.betas
    assert Config().sampling.call is not Config().sampling.call


BAD = [
    # wrong type
    (nested(actor__lr="fast"), "actor.lr='fast'", "number"),
    (nested(rollout__n=2.5), "rollout.n=2.5", "integer"),
    (nested(model__gradient_checkpointing="maybe"), "model.gradient_checkpointing='maybe'", "boolean"),
    (nested(model__path=None), "model.path=None", "string"),
    (nested(cluster__launcher="slurm"), "cluster.launcher='slurm'", "'ray' or 'local'"),
    (nested(algorithm__advantage_std="global"), "algorithm.advantage_std='global'", "'group', 'batch' or 'none'"),
    (nested(sampling__window_range=["a", 3]), "sampling.window_range.0='a'", "integer"),
    (nested(trainer=5), "trainer=5", "dictionary"),
    # unknown key
    (nested(sampling__noise_levl=0.7), "sampling.noise_levl", "did you mean 'sampling.noise_level'"),
    (nested(reward__scorers={"ocr": {"wieght": 1}}), "reward.scorers.ocr.wieght", "did you mean"),
    (nested(actor__xyzzy=1), "actor.xyzzy", "--help all lists all"),
    (nested(optimizer__lr=1), "optimizer", "--help all lists all"),
    # out of range
    (nested(actor__lr=0), "actor.lr=0", "greater than 0"),
    (nested(actor__ema_decay=1.5), "actor.ema_decay=1.5", "at most 1"),
    (nested(actor__updates_per_step=0), "actor.updates_per_step=0", "at least 1"),
    (nested(actor__betas=[0.9]), "actor.betas=[0.9]", "two numbers"),
    (nested(actor__betas=[0.9, 1.0]), "actor.betas=[0.9, 1.0]", "[0, 1)"),
    (nested(algorithm__kl_coef=-0.1), "algorithm.kl_coef=-0.1", "at least 0"),
    (nested(algorithm__clip_low=2), "algorithm.clip_low=2", "at most 1"),
    (nested(algorithm__kl_coef=float("nan")), "algorithm.kl_coef=nan", "finite number"),
    (nested(trainer__seed=-1), "trainer.seed=-1", "at least 0"),
    (nested(model__lora_rank=0), "model.lora_rank=0", "at least 1"),
    # keys that contradict each other
    (nested(rollout__n=1), "rollout.n=1", "at least 2"),
    (nested(sampling__noise_level=0), "sampling.noise_level=0", "use kernel=flow_sde"),
    (nested(sampling__window_range=[8, 10]), "sampling.window_range=[8, 10]", "end at 9"),
    (nested(sampling__window_range=[3, 3]), "sampling.window_range=[3, 3]", "first < end"),
    (nested(sampling__window_range=[1]), "sampling.window_range=[1]", "[first, end)"),
    (nested(sampling__window_size=10), "sampling.window_size=10", "only 9 steps"),
    (
        nested(sampling__window_size=4, sampling__window_range=[2, 5]),
        "sampling.window_size=4",
        "only 3 steps lie in [2, 5)",
    ),
    (nested(actor__micro_batch_size=64), "actor.micro_batch_size=64", "at most rollout.micro_batch_size=16"),
    (nested(reward__scorers={}), "reward.scorers", "+reward.scorers.ocr={}"),
    # settings with which an algorithm cannot work
    (nested(sampling__kernel="ode"), "sampling.kernel=ode", "algorithm=diffusion_nft"),
    (nested(algorithm__name="awm", rollout__n=1), "rollout.n=1", "awm compares images of the same prompt"),
    (nested(algorithm__mix=0.5), "algorithm.mix=0.5", "flow_grpo does not read it, only diffusion_nft, crd"),
    (nested(algorithm__name="flow_dppo", algorithm__clip_low=0.1), "algorithm.clip_low=0.1", "flow_dppo does not read"),
    (
        nested(algorithm__mix=1.0),
        "algorithm.mix=1.0",
        "flow_grpo does not read it, only diffusion_nft, crd",
    ),  # a default
    (
        nested(algorithm__name="rwr", algorithm__advantage_std="none"),
        "algorithm.advantage_std=none",
        "rwr does not read",
    ),
    (
        nested(algorithm__name="branch_grpo", algorithm__kl_in_reward=True),
        "algorithm.kl_in_reward=True",
        "branch_grpo does not read it, only flow_grpo, ",
    ),
    (nested(algorithm__name="nope"), "algorithm.name='nope'", "'rwr' or 'best_of_n'"),
    (nested(algorithm=5), "algorithm=5", "dictionary"),
    (nested(algorithm__name="tempflow_grpo", algorithm__kl_type="k1"), "algorithm.kl_type=k1", "use gaussian or k2"),
    (nested(algorithm__name="crd", rollout__n=20), "rollout.micro_batch_size=16", "20 images of a group"),
    (
        nested(algorithm__name="diffusion_dpo", actor__micro_batch_size=1),
        "actor.micro_batch_size=1",
        "compares 2 images",
    ),
    (nested(algorithm__cfg="off", actor__updates_per_step=2), "actor.updates_per_step=2", "use 1"),
    (nested(algorithm__kl_type="k1"), "algorithm.kl_type=k1", "kl_in_reward=true"),
    (
        nested(algorithm__kl_in_reward=True, algorithm__kl_type="velocity"),
        "algorithm.kl_in_reward=true",
        "kl_type=gaussian",
    ),
    (nested(sampling__window_schedule="decay"), "sampling.window_schedule=decay", "sampling.window_size"),
    (nested(sampling__compression=0.4), "sampling.compression=0.4", "sampling.solver=dpm2"),
    (nested(algorithm__name="awm", algorithm__old_decay=[1]), "algorithm.old_decay=[1", "[hold, start, slope, limit]"),
    (
        nested(algorithm__name="branch_grpo", algorithm__split_steps=[3, 2]),
        "algorithm.split_steps=[3, 2]",
        "rising",
    ),
    (nested(algorithm__name="branch_grpo", algorithm__split_steps=[0, 9]), "algorithm.split_steps=[0, 9]", "is 8"),
    (
        nested(algorithm__name="tempflow_grpo", sampling__window_size=3),
        "sampling.window_size",
        "no meaning for tempflow_grpo",
    ),
]


def test_one_image_per_prompt_is_enough_where_no_group_is_compared() -> None:
    for algorithm in ({"adv_estimator": "reinforce_pp"}, {"history": 16}, {"name": "branch_grpo"}):
        assert from_mapping({"algorithm": algorithm, "rollout": {"n": 1}}).rollout.n == 1


@pytest.mark.parametrize(("values", "named", "remedy"), BAD, ids=[named for _, named, _ in BAD])
def test_a_bad_value_is_named_with_its_remedy(values: dict[str, Any], named: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(values)
    message = str(caught.value)
    assert message.startswith(named), message
    assert remedy in message
    assert "\n" not in message and "pydantic" not in message


@given(st.sampled_from([name for name, _ in keys() if "NAME" not in name]), st.data())
def test_a_key_with_two_letters_swapped_is_suggested(name: str, data: st.DataObject) -> None:
    block, key = name.split(".")
    swaps = [k for k in range(len(key) - 1) if key[k] != key[k + 1]]
    if len(key) < 5 or not swaps:
        return
    k = data.draw(st.sampled_from(swaps))
    typo = key[:k] + key[k + 1] + key[k] + key[k + 2 :]
    values = {typo: 1, "name": readers(key)[0]} if block == "algorithm" else {typo: 1}
    with pytest.raises(ConfigError, match=re.escape(f"{block}.{typo}: there is no such key, did you mean '{block}.")):
        from_mapping({block: values})
    assert did_you_mean(f"{block}.{typo}") == f", did you mean {name!r}"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_run_has_the_keys_that_its_algorithm_reads(name: str) -> None:
    settings = from_mapping({"algorithm": {"name": name}, "sampling": {"kernel": "flow_sde"}}).algorithm
    read = {known.removeprefix("algorithm.") for known, _ in keys(BY_NAME[name]) if known.startswith("algorithm.")}
    assert set(dataclasses.asdict(settings)) == read == {f.name for f in dataclasses.fields(settings)}
    for known, _ in keys():
        block, _, leaf = known.partition(".")
        if block == "algorithm":
            assert (leaf in read) == (name in readers(leaf))
    assert len([f for _, f in keys(BY_NAME[name]) if f.metadata["often"]]) <= 40


def test_every_key_is_listed_once() -> None:
    names = [name for name, _ in keys()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("name", "key"), keys(), ids=[name for name, _ in keys()])
def test_every_key_has_a_help_text_and_a_default(name: str, key: dataclasses.Field[Any]) -> None:
    assert len(key.metadata["help"].split()) >= 2, name
    assert key.default is not dataclasses.MISSING or key.default_factory is not dataclasses.MISSING


def test_the_keys_are_the_fields_of_the_configuration() -> None:
    config = Config()
    for name, key in keys(type(config.algorithm)):
        if "NAME" not in name:
            block, attribute = name.split(".")
            assert key.name == attribute and hasattr(getattr(config, block), attribute)
