"""The configuration: defaults are accepted, and each bad value is refused by its key, with the value and the remedy."""

import dataclasses
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each
from training import DRAWN

from gerl.commandline.composition import compose_changes, typed_texts
from gerl.config import Config, DataConfig, SamplingConfig, ScorerConfig, did_you_mean, from_mapping, keys, readers
from gerl.config.blocks import KernelName
from gerl.config.registry import ALGORITHMS
from gerl.config.user_files import only_typed
from gerl.data.sources import load
from gerl.errors import ConfigError, DataError, TrustError
from gerl.rewards.scorers import known_scorer


def test_the_defaults_are_accepted_and_survive_a_round_trip() -> None:
    assert from_mapping({}) == Config()
    assert from_mapping(dataclasses.asdict(Config())) == Config()


def test_values_that_are_given_arrive_typed() -> None:
    config = from_mapping(
        {
            "actor": {"lr": 1},
            "sampling": {"window_range": [1, 5], "window_size": 3},
            "reward": {"scorers": {"mine": {"path": "a.py"}}},
        }
    )
    assert config.actor.lr == 1.0 and isinstance(config.actor.lr, float)
    assert config.sampling.steps_range == (1, 5) and config.sampling.trained_steps == 3
    assert config.reward.scorers["mine"].path == "a.py" and config.reward.scorers["mine"].weight == 1.0


def test_a_window_of_all_steps_but_the_last_is_the_default() -> None:
    config = from_mapping({"sampling": {"num_inference_steps": 6}})
    assert config.sampling.steps_range == (0, 5) and config.sampling.trained_steps == 5


@pytest.mark.parametrize("kernel", get_args(KernelName))
def test_where_the_noise_fades_the_default_window_ends_a_step_earlier(kernel: str) -> None:
    fades = kernel in ("cps", "precise", "dance_precise")
    sampling = SamplingConfig(num_inference_steps=6, kernel=kernel)  # type: ignore[arg-type]
    assert sampling.steps_range == (0, 4 if fades else 5) and sampling.trained_steps == 4 + (not fades)
    assert dataclasses.replace(sampling, window_range=[0, 5]).trained_steps == 5, "who asks for it gets it"
    assert SamplingConfig(num_inference_steps=2, kernel=kernel).steps_range == (0, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"window_size=6: only [45] steps .*; lower it") as error:
        dataclasses.replace(sampling, window_size=6)
    assert ("almost no noise" in str(error.value)) == fades


def test_tensorboard_can_be_left_out_by_its_own_key_as_before() -> None:
    both = {"trackers": ["wandb", "tensorboard", "wandb"]}
    assert from_mapping({}).logger.used_trackers == ["tensorboard"]
    assert from_mapping({"logger": {"tensorboard": False}}).logger.used_trackers == []
    assert from_mapping({"logger": both}).logger.used_trackers == ["wandb", "tensorboard"]
    assert from_mapping({"logger": {**both, "tensorboard": False}}).logger.used_trackers == ["wandb"]
    assert from_mapping({"logger": {"trackers": [], "tensorboard": True}}).logger.used_trackers == []


def test_the_configuration_is_frozen() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.actor.lr = 1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.actor = config.actor  # type: ignore[misc]


def test_defaults_are_not_shared_between_configurations() -> None:
    assert Config().actor.betas is not Config().actor.betas
    assert Config().sampling.call is not Config().sampling.call


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


HELD_OUT = {"a": {"weight": 0, "during": "validation"}}
BAD = [
    # wrong type
    ({"actor": {"lr": "fast"}}, "actor.lr='fast'", "number"),
    ({"rollout": {"n": 2.5}}, "rollout.n=2.5", "an integer"),
    ({"model": {"gradient_checkpointing": "maybe"}}, "model.gradient_checkpointing='maybe'", "true or false"),
    ({"model": {"path": None}}, "model.path=null", "a string"),
    ({"cluster": {"launcher": "slurm"}}, "cluster.launcher='slurm'", "'ray' or 'local'"),
    ({"algorithm": {"advantage_std": "global"}}, "algorithm.advantage_std='global'", "'group', 'batch' or 'none'"),
    ({"sampling": {"window_range": ["a", 3]}}, "sampling.window_range.0='a'", "an integer"),
    ({"trainer": 5}, "trainer=5", "trainer.steps=VALUE"),
    ({"logger": {"trackers": "wandb"}}, "logger.trackers='wandb'", "a list, such as [tensorboard,wandb]"),
    ({"logger": {"trackers": None}}, "logger.trackers=null", "[] for none"),
    ({"logger": {"trackers": ["comet"]}}, "logger.trackers.0='comet'", "'wandb', 'trackio', 'mlflow' or 'swanlab'"),
    # unknown key
    ({"sampling": {"noise_levl": 0.7}}, "sampling.noise_levl", "did you mean 'sampling.noise_level'"),
    ({"reward": {"scorers": {"ocr": {"wieght": 1}}}}, "reward.scorers.ocr.wieght", "did you mean"),
    ({"actor": {"xyzzy": 1}}, "actor.xyzzy", "--help all lists all"),
    ({"optimizer": {"lr": 1}}, "optimizer", "--help all lists all"),
    # out of range
    ({"actor": {"lr": 0}}, "actor.lr=0", "greater than 0"),
    ({"actor": {"ema_decay": 1.5}}, "actor.ema_decay=1.5", "at most 1"),
    ({"actor": {"updates_per_step": 0}}, "actor.updates_per_step=0", "at least 1"),
    ({"actor": {"betas": [0.9]}}, "actor.betas=[0.9]", "two numbers"),
    ({"actor": {"betas": [0.9, 1.0]}}, "actor.betas=[0.9, 1.0]", "[0, 1)"),
    ({"algorithm": {"kl_coef": -0.1}}, "algorithm.kl_coef=-0.1", "at least 0"),
    ({"algorithm": {"clip_low": 2}}, "algorithm.clip_low=2", "at most 1"),
    ({"algorithm": {"kl_coef": 0.1, "kl_share": 0.1}}, "algorithm.kl_share=0.1", "+reward.scorers.aesthetic.weight=0"),
    ({"algorithm": {"kl_reset_every": 15}}, "algorithm.kl_reset_every=15", "algorithm.kl_coef=0.04"),
    ({"algorithm": {"kl_reset_above": 3e-4}}, "algorithm.kl_reset_above=0.0003", "algorithm.kl_coef=0.04"),
    (
        {"algorithm": {"kl_coef": 0.1, "kl_share": 0.1, "kl_doubters": ["ocr"]}},
        "algorithm.kl_doubters: 'ocr'",
        "+reward.scorers.ocr.weight=0",
    ),
    (
        {"reward": {"scorers": {"a": {"during": "validation"}}}},
        "reward.scorers.NAME.during=validation",
        "set its weight to 0",
    ),
    (
        {"reward": {"scorers": {"ocr": {}, **HELD_OUT}}, "algorithm": {"kl_coef": 0.1, "kl_share": 0.1}},
        "algorithm.kl_share=0.1",
        "in training",
    ),
    (
        {
            "reward": {"scorers": {"ocr": {}, **HELD_OUT}},
            "algorithm": {"kl_coef": 0.1, "kl_share": 0.1, "kl_doubters": ["a"]},
        },
        "algorithm.kl_doubters: a",
        "reward.scorers.a.during=validation; remove",
    ),
    (
        {
            "reward": {"scorers": {"ocr": {}, **HELD_OUT}},
            "algorithm": {"diversity": "add", "diversity_scorer": "a/b"},
        },
        "algorithm.diversity=add",
        "remove reward.scorers.a.during",
    ),
    (
        {"reward": {"scorers": {"ocr": {}, **HELD_OUT}}, "validation": {"data": None}},
        "reward.scorers.a.during=validation",
        "validation.data",
    ),
    ({"algorithm": {"diversity": "add"}}, "algorithm.diversity=add", "+reward.scorers.diversity.weight=0"),
    ({"guard": {"action": "rollback"}, "validation": {"data": None}}, "guard.action=rollback", "guard.action=warn"),
    ({"guard": {"rollbacks": 0}}, "guard.rollbacks=0", "at least 1"),
    ({"algorithm": {"kl_coef": float("nan")}}, "algorithm.kl_coef=nan", "finite number"),
    ({"trainer": {"seed": -1}}, "trainer.seed=-1", "at least 0"),
    ({"model": {"lora_rank": 0}}, "model.lora_rank=0", "at least 1"),
    ({"logger": {"project": "a b/c"}}, "logger.project='a b/c'", "ASCII letters, digits"),
    ({"logger": {"project": ""}}, "logger.project=''", "ASCII letters, digits"),
    ({"logger": {"tags": ["a" * 65]}}, "logger.tags: 'aaaa", "1 to 64"),
    # keys that contradict each other
    ({"rollout": {"n": 1}}, "rollout.n=1", "at least 2"),
    ({"sampling": {"noise_level": 0}}, "sampling.noise_level=0", "use kernel=flow_sde"),
    ({"sampling": {"window_range": [8, 10]}}, "sampling.window_range=[8, 10]", "end at 9"),
    ({"sampling": {"window_range": [None, 3]}}, "sampling.window_range=[None, 3]", "[first, end)"),
    ({"sampling": {"window_range": [8, 12], "kernel": "ode"}}, "sampling.window_range=[8, 12]", "end at 10 or"),
    ({"sampling": {"window_range": [3, 3]}}, "sampling.window_range=[3, 3]", "first < end"),
    ({"sampling": {"window_range": [1]}}, "sampling.window_range=[1]", "[first, end)"),
    ({"sampling": {"window_size": 10}}, "sampling.window_size=10", "only 9 steps"),
    ({"sampling": {"window_size": 4, "window_range": [2, 5]}}, "sampling.window_size=4", "only 3 steps lie in [2, 5)"),
    ({"actor": {"micro_batch_size": 64}}, "actor.micro_batch_size=64", "at most rollout.micro_batch_size=16"),
    # settings with which an algorithm cannot work
    ({"sampling": {"kernel": "ode"}}, "sampling.kernel=ode", "algorithm=diffusion_nft"),
    ({"algorithm": {"name": "awm"}, "rollout": {"n": 1}}, "rollout.n=1", "awm compares images of the same prompt"),
    ({"algorithm": {"mix": 0.5}}, "algorithm.mix=0.5", "flow_grpo does not read it, only crd, diffusion_nft"),
    ({"algorithm": {"name": "flow_dppo", "clip_low": 0.1}}, "algorithm.clip_low=0.1", "flow_dppo does not read"),
    (
        {"algorithm": {"mix": 1.0}},
        "algorithm.mix=1.0",
        "flow_grpo does not read it, only crd, diffusion_nft",
    ),  # a default
    ({"algorithm": {"name": "rwr", "advantage_std": "none"}}, "algorithm.advantage_std=none", "rwr does not read"),
    (
        {"algorithm": {"name": "branch_grpo", "kl_in_reward": True}},
        "algorithm.kl_in_reward=true",
        "branch_grpo does not read it, only flow_grpo, ",
    ),
    ({"algorithm": {"name": "nope"}}, "algorithm.name='nope'", "or 'tree_grpo'"),
    ({"algorithm": 5}, "algorithm=5", "dictionary"),
    ({"algorithm": {"name": "tempflow_grpo", "kl_type": "k1"}}, "algorithm.kl_type=k1", "use gaussian or k2"),
    (
        {"algorithm": {"name": "awm", "off_policy": False}, "actor": {"updates_per_step": 2}},
        "actor.updates_per_step=2",
        "off_policy=true",
    ),
    (
        {"algorithm": {"name": "dgpo", "rollout_old_after": 5, "rollout_decay": [0, 0.0, 0.0, 0.0]}},
        "algorithm.rollout_old_after=5",
        "algorithm.rollout_decay",
    ),
    (
        {"algorithm": {"name": "dgpo", "reference": "old", "reference_guidance": 4.5}},
        "algorithm.reference_guidance",
        "kl_coef=0",
    ),
    ({"algorithm": {"cfg": "off"}, "actor": {"updates_per_step": 2}}, "actor.updates_per_step=2", "use 1"),
    ({"algorithm": {"cfg": "off"}, "actor": {"epochs": 2}}, "actor.epochs=2", "use 1"),
    ({"algorithm": {"kl_type": "k1"}}, "algorithm.kl_type=k1", "kl_in_reward=true"),
    ({"algorithm": {"kl_in_reward": True, "kl_type": "velocity"}}, "algorithm.kl_in_reward=true", "kl_type=gaussian"),
    ({"sampling": {"window_schedule": "decay"}}, "sampling.window_schedule=decay", "sampling.window_size"),
    ({"sampling": {"compression": 0.4}}, "sampling.compression=0.4", "sampling.solver=dpm2"),
    ({"algorithm": {"name": "awm", "old_decay": [1]}}, "algorithm.old_decay=[1", "[hold, start, slope, limit]"),
    ({"algorithm": {"name": "branch_grpo", "split_steps": [3, 2]}}, "algorithm.split_steps=[3, 2]", "increasing"),
    (
        {"algorithm": {"name": "branch_grpo", "split_noise": 4}, "sampling": {"kernel": "cps", "noise_level": 0.3}},
        "algorithm.split_noise=4",
        "exceeds 1, the maximum of cps",
    ),
    ({"algorithm": {"clip_dimensions": 0}}, "algorithm.clip_dimensions=0", "at least 1"),
    ({"algorithm": {"likelihood": "laplace"}}, "algorithm.likelihood='laplace'", "squared_error"),
    ({"sampling": {"window_stride": -1}}, "sampling.window_stride=-1", "at least 0"),
    ({"algorithm": {"name": "branch_grpo", "split_steps": [0, 9]}}, "algorithm.split_steps=[0, 9]", "is 8"),
    (
        {"algorithm": {"name": "tempflow_grpo"}, "sampling": {"window_size": 3}},
        "sampling.window_size",
        "no effect for tempflow_grpo",
    ),
    # too much of anything
    ({"trainer": {"steps": 10**400}}, "trainer.steps=1000", "less than 2**64"),
    ({"trainer": {"seed": 10**5000}}, "trainer.seed=int without end", "less than 2**64"),
    ({"checkpoint": {"keep": 10**400}}, "checkpoint.keep=1000", "less than 2**64"),
    ({"actor": {"lr": 10**400}}, "actor.lr=1000", "number"),
    ({"trainer": {"seed": "1" * 5000}}, "trainer.seed='1111", "integer"),
    ({"rollout": {"n": 10**11}}, "rollout.prompts_per_step=8 times rollout.n=100000000000", "at most 1000000"),
    ({"sampling": {"num_inference_steps": 10**9}}, "sampling.num_inference_steps=1000000000", "at most 10000"),
    ({"sampling": {"width": 10**9}}, "sampling.width=1000000000", "at most 32768"),
    ({"sampling": {"call": nested(40)}}, "sampling.call has more than 32", "use fewer"),
    ({"sampling": {"call": {"a": nested(5000)}}}, "sampling.call has more than 32", "use fewer"),
    ({"reward": {"scorers": {"ocr": {"kwargs": nested(40)}}}}, "reward.scorers.NAME.kwargs has", "use fewer"),
    ({"data": {"train": "a\0"}}, r"data.train='a\x00'", "control character"),
    ({"cluster": {"actor_workers": 2}}, "cluster.actor_workers=2", "or cluster.layout=split"),
    ({"cluster": {"layout": "split", "num_workers": 1}}, "cluster.num_workers=1", "use 2"),
    (
        {"cluster": {"layout": "split", "num_workers": 4, "rollout_workers": 4}},
        "cluster.rollout_workers=4",
        "of cluster.num_workers=4 none is left",
    ),
    (
        {"cluster": {"layout": "split", "num_workers": 4, "rollout_workers": 2, "actor_workers": 1}},
        "cluster.rollout_workers=2 and cluster.actor_workers=1",
        "remove one of the three",
    ),
    ({"model": {"path": "\x1b[31mx"}}, r"model.path='\x1b[31mx'", "control character"),
]


def test_one_image_per_prompt_is_enough_where_no_group_is_compared() -> None:
    for algorithm in ({"adv_estimator": "reinforce_pp"}, {"history": 16}, {"name": "branch_grpo"}):
        assert from_mapping({"algorithm": algorithm, "rollout": {"n": 1}}).rollout.n == 1


@each(("values", "named", "remedy"), BAD)
def test_a_bad_value_is_named_with_its_remedy(values: dict[str, Any], named: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(values)
    message = str(caught.value)
    assert message.startswith(named), message
    assert remedy in message
    assert "\n" not in message and "pydantic" not in message and len(message) < 600


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


ON_FILES = {"sft": {"train_on": "files"}}


@each("name", ALGORITHMS)
def test_a_run_has_the_keys_that_its_algorithm_reads(name: str) -> None:
    sampling = DRAWN.get(name, {"kernel": "flow_sde"})
    settings = from_mapping(
        {"algorithm": {"name": name}, "sampling": sampling, "data": ON_FILES.get(name, {})}
    ).algorithm
    read = {
        known.removeprefix("algorithm.")
        for known, _ in keys(ALGORITHMS[name].config_class)
        if known.startswith("algorithm.")
    }
    assert set(dataclasses.asdict(settings)) == read == {f.name for f in dataclasses.fields(settings)}
    for known, _ in keys():
        block, _, leaf = known.partition(".")
        if block == "algorithm":
            assert (leaf in read) == (name in readers(leaf))
    assert len([f for _, f in keys(ALGORITHMS[name].config_class) if f.metadata["often"]]) <= 40


@each(("name", "key"), keys())
def test_every_key_has_a_help_text_and_a_default(name: str, key: dataclasses.Field[Any]) -> None:
    assert len(key.metadata["help"].split()) >= 2, name
    assert key.default is not dataclasses.MISSING or key.default_factory is not dataclasses.MISSING


@pytest.mark.parametrize(
    ("given", "levels"), [([0, 10], (0, 10)), ([0, None], (0, 10)), ([1, None], (1, 10)), (None, (0, 9))]
)
def test_noise_levels_that_are_trained_may_include_the_last(
    given: list[int | None] | None, levels: tuple[int, int]
) -> None:
    sampling: dict[str, Any] = {"kernel": "ode", "window_range": given}
    config = from_mapping({"algorithm": {"name": "diffusion_nft"}, "sampling": sampling})
    assert config.sampling.steps_range == levels


def test_an_open_range_ends_before_the_last_step_where_steps_have_noise() -> None:
    config = from_mapping({"algorithm": {"name": "fdfo"}, "sampling": {"kernel": "cps", "window_range": [0, None]}})
    assert config.sampling.steps_range == (0, 9)


def test_code_that_only_the_settings_of_a_run_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("raise AssertionError('it runs')\n")
    typed = compose_changes({}, []).algorithm.name
    settings: dict[str, dict[str, Any]] = {
        "algorithm.path": {"algorithm": {"name": typed, "path": str(file)}},
        "model.path": {"model": {"path": "${oc.env:HOME}"}},
        "reward.scorers.a.kwargs": {"reward": {"scorers": {"a": {"kwargs": {"url": ["${oc.env:HOME}"]}}}}},
    }
    scorers = {
        "path": ScorerConfig(path=str(file)),
        "env.pip": ScorerConfig(env={"pip": ["its_package"]}),
        "env.python": ScorerConfig(env={"python": "its/python"}),
        "kwargs.token_env": ScorerConfig(kwargs={"token_env": "HOME"}),
        "kwargs.url": ScorerConfig(kwargs={"url": "http://its.host", "scorer": "a"}),
        "kwargs.base_url": ScorerConfig(kwargs={"base_url": "http://127.0.0.1:8000", "model": "a"}),
    }
    refused: dict[str, Callable[[], object]] = {
        key: lambda block=block: compose_changes(block, ["trainer.steps=3"]) for key, block in settings.items()
    }
    refused |= {
        f"reward.scorers.a.{key}": lambda scorer=scorer: known_scorer("a", scorer) for key, scorer in scorers.items()
    }
    refused |= {
        f"file={file}": lambda: load(f"{file}:rows", DataConfig(), "data.train"),
        "this:s": lambda: load("this:s", DataConfig(), "data.train"),
    }
    for key, work in refused.items():
        with only_typed(typed_texts(["trainer.steps=3", "data.train=a.py:rows"])), pytest.raises(TrustError) as error:
            work()
        assert key in str(error.value) and "trust=true" in str(error.value)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with only_typed(()), pytest.raises(TrustError, match=digest):
        known_scorer("a", scorers["path"])
    with only_typed(typed_texts([f"data.train={file}:rows"])), pytest.raises(DataError, match="it runs"):
        load(f"{file}:rows", DataConfig(), "data.train")
