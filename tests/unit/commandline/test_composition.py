"""From the command line to a configuration. What bad input gets is in tests/e2e/test_wrong_inputs.py."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml

from gerl.commandline.composition import compose_run
from gerl.commandline.experiments import experiments, shipped
from gerl.config import SamplingConfig, ScorerConfig, from_mapping
from gerl.config.algorithms import BY_NAME, AWMConfig
from gerl.errors import ConfigError


def test_without_a_recipe_the_defaults_are_those_of_the_dataclasses() -> None:
    composed = compose_run(["experiment=plain"])
    algorithm = {"advantage_std": "batch", "timestep_weights": "std2_over_jacobian"}
    preset = {"algorithm": algorithm, "actor": {"updates_per_step": 2}, "sampling": {"same_init_noise": True}}
    assert composed.config == from_mapping(preset)  # of flow_grpo
    assert composed.experiment == "plain"
    assert re.fullmatch(r"outputs/plain/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(composed.run_dir))


def test_the_demo_is_what_runs_without_arguments() -> None:
    composed = compose_run([])
    assert composed.experiment == "signs"
    assert composed.config.model.path == "signs"
    assert list(composed.config.reward.scorers) == ["ocr", "colour"]


@pytest.mark.parametrize("name", experiments())
def test_every_shipped_experiment_composes(name: str) -> None:
    composed = compose_run([f"experiment={name}"])
    assert composed.experiment == name and composed.run_dir.parent == Path("outputs") / name


def test_overrides() -> None:
    given = "trainer.steps=7 actor.lr=1e-4 validation.data=null sampling.window_range=[1,3] model.path=a/b".split()
    config = compose_run(["experiment=plain", *given]).config
    assert (config.trainer.steps, config.actor.lr, config.validation.data) == (7, 1e-4, None)
    assert (config.sampling.window_range, config.model.path) == ([1, 3], "a/b")
    assert compose_run(["hydra.run.dir=here/and/there"]).run_dir == Path("here/and/there")
    assert compose_run(["trainer.steps=7", "trainer.steps=7"]).config.trainer.steps == 7


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("hf:owner/name[train]", "hf:owner/name[train]"),
        ("hf:owner/name@v1[train[:10%]+test]", "hf:owner/name@v1[train[:10%]+test]"),
        ("'hf:owner/name[train]'", "hf:owner/name[train]"),
        ("[a.txt,hf:./b[train]]", ["a.txt", "hf:./b[train]"]),
        (
            '[{path: hf:a/b[c], weight: 2}, {path: "hf:d/e[f]"}]',
            [{"path": "hf:a/b[c]", "weight": 2}, {"path": "hf:d/e[f]"}],
        ),
    ],
)
def test_splits_of_data_sets_need_no_quotes(given: str, found: object) -> None:
    assert compose_run(["experiment=plain", f"data.train={given}"]).config.data.train == found


def test_columns_need_no_plus_sign() -> None:
    assert compose_run(["experiment=plain", "data.columns={text: word}"]).config.data.columns == {"text": "word"}
    assert compose_run(["experiment=plain", "data.columns.text=word"]).config.data.columns == {"text": "word"}


@pytest.mark.parametrize("plus", ["", "+"])
def test_entries_of_dictionaries_need_no_plus_sign(plus: str) -> None:
    given = ["reward.scorers.mine={path: mine.py, weight: 0.5}", "sampling.call.max_sequence_length=8"]
    config = compose_run(["experiment=plain", *(plus + override for override in given)]).config
    assert config.reward.scorers == {"mine": ScorerConfig(weight=0.5, path="mine.py")}
    assert config.sampling.call == {"max_sequence_length": 8}
    nested = compose_run(["experiment=plain", f"{plus}reward.scorers.mine.kwargs.level.low=1"]).config
    assert nested.reward.scorers["mine"].kwargs == {"level": {"low": 1}}


def test_a_scorer_is_added_to_those_of_the_experiment() -> None:
    scorers = compose_run(["reward.scorers.jpeg_compressibility.weight=0.1"]).config.reward.scorers
    assert list(scorers) == ["ocr", "colour", "jpeg_compressibility"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["reward.scorers={mine: {path: a.py}}"], ["mine"]),
        (["++reward.scorers={mine: {path: a.py}}"], ["mine"]),
        (["reward.scorers={mine: {path: a.py}, ocr: {weight: 2}}"], ["mine", "ocr"]),
        (["+reward.scorers={mine: {path: a.py}}"], ["ocr", "colour", "mine"]),
        (["+reward.scorers.mine={path: a.py}"], ["ocr", "colour", "mine"]),
        (["reward.scorers.mine.path=a.py"], ["ocr", "colour", "mine"]),
        (["+reward.scorers.mine={path: a.py}", "~reward.scorers.ocr"], ["colour", "mine"]),
        # in the order in which they stand
        (["reward.scorers={mine: {path: a.py}}", "reward.scorers.sharpness.weight=0"], ["mine", "sharpness"]),
        (["reward.scorers={mine: {path: a.py}}", "+reward.scorers.ocr={}"], ["mine", "ocr"]),
        (["reward.scorers.sharpness.weight=0", "reward.scorers={mine: {path: a.py}}"], ["mine"]),
        (["reward.scorers={a: {path: a.py}, mine: {path: a.py}}", "~reward.scorers.a"], ["mine"]),
    ],
)
def test_scorers_given_as_a_whole_replace_those_of_the_experiment(given: list[str], names: list[str]) -> None:
    scorers = compose_run(given).config.reward.scorers
    assert list(scorers) == names
    assert scorers["mine"] == ScorerConfig(path="a.py")


def test_naming_no_scorers_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.scorers has no scorer with a weight"):
        compose_run(["reward.scorers={}"])
    with pytest.raises(ConfigError, match=r"reward\.scorers=null: .*dictionary"):
        compose_run(["reward.scorers=null"])


def test_an_experiments_lora_targets_are_left_out_without_a_lora() -> None:
    assert compose_run(["model.train=full"]).config.model.lora_targets is None
    assert compose_run([]).config.model.lora_targets == ".*"
    with pytest.raises(ConfigError, match=r"model\.lora_targets=x: with model\.train=full there is no LoRA"):
        compose_run(["model.train=full", "model.lora_targets=x"])


def test_what_changes_a_scorer_is_checked_as_before() -> None:
    with pytest.raises(ConfigError, match=r"reward\.scorers\.ocr\.wieght: .*'reward\.scorers\.ocr\.weight'"):
        compose_run(["reward.scorers={ocr: {}}", "reward.scorers.ocr.wieght=1"])
    with pytest.raises(ConfigError, match=r"^reward\.scorers\.ocr\.weight=\{a: .*bracket"):
        compose_run(["reward.scorers.ocr.weight={a"])


@pytest.mark.parametrize("defaults", ["[signs]", "[signs, _self_]"])
def test_an_experiment_of_your_own_replaces_the_scorers_of_what_it_is_composed_from(
    tmp_path: Path, defaults: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: {defaults}\nreward:\n  scorers:\n    sharpness: {{weight: 2}}\n  retries: 3\n")
    reward = compose_run([f"experiment={path}"]).config.reward
    assert (reward.scorers, reward.retries) == ({"sharpness": ScorerConfig(weight=2)}, 3)
    more = compose_run([f"experiment={path}", "reward.scorers.ocr.weight=0", "algorithm=crd"]).config
    assert list(more.reward.scorers) == ["sharpness", "ocr"] and more.sampling.height == 32
    path.write_text(f"defaults: {defaults}\nreward:\n  retries: 3\n")  # names none: those of signs
    kept = compose_run([f"experiment={path}", "reward.scorers.ocr.weight=3"]).config.reward.scorers
    assert kept["ocr"] == ScorerConfig(weight=3, replicas=2)


def test_an_experiment_of_your_own_may_come_before_what_it_is_composed_from(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [_self_, signs]\nreward: {scorers: {sharpness: {weight: 2}}}\n")
    assert list(compose_run([f"experiment={path}"]).config.reward.scorers) == ["sharpness", "ocr", "colour"]


def test_an_experiment_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "my try, 2.yaml"
    path.write_text("defaults:\n  - signs\ntrainer:\n  steps: 3\nactor:\n  lr: 1e-5\n")
    composed = compose_run([f"experiment={path}", "trainer.seed=5"])
    assert (composed.config.trainer.steps, composed.config.actor.lr, composed.config.trainer.seed) == (3, 1e-5, 5)
    assert composed.config.sampling == compose_run(["experiment=signs"]).config.sampling
    assert composed.experiment == composed.run_dir.parent.name == "my_try__2"
    path.write_text("trainer:\n  steps: 4\n")  # read anew each time, and without the one before
    again = compose_run([f"experiment={path}"]).config
    assert (again.trainer.steps, again.sampling) == (4, SamplingConfig(same_init_noise=True))


def test_the_config_of_a_run_is_an_experiment(tmp_path: Path) -> None:
    first = compose_run(["trainer.seed=3", "reward.scorers.ocr.kwargs.threads=2", "sampling.window_size=2"])
    (tmp_path / "config.yaml").write_text(first.yaml())
    again = compose_run([f"experiment={tmp_path / 'config.yaml'}"])
    assert again.config == first.config
    values = yaml.safe_load(first.yaml())
    assert values["experiment"] == "signs"
    assert set(values["algorithm"]) == {f.name for f in dataclasses.fields(AWMConfig)}  # nothing that it does not read


@pytest.mark.parametrize("name", shipped("algorithm"))
def test_an_algorithm_is_picked_with_its_settings(name: str) -> None:
    config = compose_run([f"algorithm={name}"]).config
    others = {
        "mix_grpo_flash": "mix_grpo",
        "awm_fast": "awm",
        "guidance_distillation": "opd",
        "few_step_grpo": "flow_grpo",
        "diffusion_dpo_offline": "diffusion_dpo",
        "ddrl": "flow_grpo",
    }
    assert config.algorithm.name == others.get(name, name)
    assert (config.sampling.height, config.trainer.steps) == (32, 76)  # of the signs experiment
    assert compose_run(["experiment=plain", f"algorithm={name}"]).config.algorithm == config.algorithm
    assert compose_run([f"algorithm={name}", "algorithm.advantage_clip=2"]).config.algorithm.advantage_clip == 2


def test_every_algorithm_has_settings() -> None:
    assert set(BY_NAME) <= set(shipped("algorithm"))


def test_an_experiment_that_names_its_algorithm_is_not_silently_stronger(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(compose_run([]).yaml())
    with pytest.raises(ConfigError, match=r"algorithm=crd: .*algorithm\.name=\w+, .*remove"):
        compose_run([f"experiment={tmp_path / 'config.yaml'}", "algorithm=crd"])


def test_it_works_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compose_run([]).config
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "mine.yaml").write_text("trainer:\n  steps: 3\n")
    assert compose_run([]).config == expected
    assert compose_run(["experiment=mine.yaml"]).config.trainer.steps == 3
    assert os.listdir(tmp_path / "configs") == []


def test_hydra_errors_are_sentences() -> None:
    refused = ("trainer.stepz=1", "trainer.steps", "experiment=nope", "model.path=a,b", "a b", "model.path='${x}'")
    for override in refused:
        with pytest.raises(ConfigError) as caught:
            compose_run([override])
        assert "\n" not in str(caught.value) and "hydra.cc" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "named", "remedy"),
    [
        (["algorithm.timestep=2"], "algorithm.timestep: there is no such key", "did you mean 'algorithm.timesteps'"),
        (["algorithm.zebra=1"], "algorithm.zebra: there is no such key", "--help all lists all"),
        (["+algorithm.zebra=1"], "algorithm.zebra: there is no such key", "--help all lists all"),
        (["algorithm.mix=1"], "algorithm.mix=1: awm does not read it", "only diffusion_nft, crd"),
        (["algorithm=mix_grpo", "algorithm.mix=1"], "algorithm.mix=1: mix_grpo does not read it", "only diffusion_nft"),
        (
            ["experiment=wan21_1b3_ocr", "algorithm=crd"],
            "algorithm.timestep_weights=uniform: crd does not read it",
            "only flow",
        ),
    ],
)
def test_a_key_of_another_algorithm_needs_no_plus_sign_to_get_a_sentence(
    given: list[str], named: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run(given)
    assert str(caught.value).startswith(named) and remedy in str(caught.value)


@pytest.mark.parametrize("value", ["{a: " * 200 + "1" + "}" * 200, "[" * 200 + "]" * 200])
def test_mappings_without_end_are_one_sentence(value: str) -> None:
    with pytest.raises(ConfigError, match="use fewer"):
        compose_run([f"sampling.call.a={value}"])
