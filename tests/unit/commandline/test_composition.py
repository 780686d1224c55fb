"""From the command line to a configuration. What bad input gets is in tests/e2e/test_wrong_inputs.py."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from gerl.algorithms.awm import AWMConfig
from gerl.commandline.composition import (
    asked_for,
    compose_run,
    experiments,
    hydra_options,
    quoted,
    replaced_scorers,
    shipped,
    without_options,
)
from gerl.config import ScorerConfig, from_mapping, load
from gerl.config.registry import ALGORITHMS
from gerl.errors import ConfigError
from gerl.evaluate.command import parse as evaluation
from gerl.preflight.arguments import parse as preflight
from gerl.score.command import parse as scoring


def test_without_a_recipe_the_defaults_are_those_of_the_dataclasses() -> None:
    composed = compose_run(["experiment=plain", "algorithm=flow_grpo"])
    algorithm = {"advantage_std": "batch", "timestep_weights": "std2_over_jacobian"}
    preset = {"algorithm": algorithm, "actor": {"updates_per_step": 2}, "sampling": {"same_init_noise": True}}
    preset |= {"validation": {"every": 25, "num_inference_steps": 28}, "checkpoint": {"every": 25}}
    assert composed.config == from_mapping(preset)  # of flow_grpo and plain
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


def test_load_returns_the_configuration_of_a_run(tmp_path: Path) -> None:
    assert load() == compose_run([]).config
    assert load("sd35_medium_ocr", ["rollout.n=8"]) == compose_run(["experiment=sd35_medium_ocr", "rollout.n=8"]).config
    written = tmp_path / "config.yaml"
    written.write_text(compose_run(["trainer.steps=7"]).yaml())
    assert load(written).trainer.steps == 7
    with pytest.raises(ConfigError, match=r"rollout\.m"):
        load(overrides=["rollout.m=8"])


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


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a photo of {prompt}, {style}", "a photo of {prompt}, {style}"),
        ("{prompt}", "{prompt}"),
        ("{prompt} in {style}", "{prompt} in {style}"),
        ("'{prompt}, it\\'s \"{word}\"'", '{prompt}, it\'s "{word}"'),
        ("a {prompt: x", "data.template="),
        ("null", None),
    ],
)
def test_a_template_needs_no_quotes(given: str, found: str | None) -> None:
    if found == "data.template=":
        with pytest.raises(ConfigError, match=found):
            compose_run([f"data.template={given}"])
        return
    assert compose_run([f"data.template={given}"]).config.data.template == found
    assert compose_run(["experiment=plain", f"data.template={given}"]).config.data.template == found


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


MINE = "reward.scorers={mine: {path: a.py}}"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([], []),
        (["reward.scorers.mine.path=a.py", "reward.scorers.ocr.weight=0"], []),  # still there
        (["reward.scorers.mine.path=a.py", "~reward.scorers.ocr"], []),
        ([MINE], ["ocr", "colour"]),
        ([MINE, "+reward.scorers.ocr.weight=0"], ["colour"]),
        ([MINE, "~reward.scorers.ocr"], ["colour"]),
        (["~reward.scorers.ocr", MINE, "~reward.scorers.colour"], []),
        (["reward.scorers={mine: {path: a.py}, ocr: null}"], ["colour"]),
        ([MINE, "experiment=plain"], []),  # its ocr is a default, which nobody chose
        ([MINE, "model.path=other"], []),
        ([MINE, "experiment=sd35_medium_ocr"], ["ocr"]),
        (["experiment=mine.yaml"], ["ocr"]),
        (["experiment=mine.yaml", "~reward.scorers.ocr"], []),
        (["experiment=mine.yaml", MINE], ["ocr", "sharpness"]),
        (["experiment=above.yaml"], ["ocr", "sharpness"]),
        (["reward.scorers={}", "algorithm=sft", "data.train=a.jsonl"], []),  # no reward at all
    ],
)
def test_scorers_of_the_experiment_that_others_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], names: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = "defaults: [signs, _self_]\nreward: {scorers: {sharpness: {weight: 2}, colour: null}}\n"
    (tmp_path / "mine.yaml").write_text(mine)
    (tmp_path / "above.yaml").write_text("defaults: [mine.yaml, _self_]\nreward: {scorers: {other: {path: b.py}}}\n")
    found = replaced_scorers(given, asked_for(given))
    assert list(found) == names
    assert not found.keys() & compose_run(given).config.reward.scorers.keys()
    assert "ocr" not in found or found["ocr"].weight == 1


def test_null_removes_a_scorer(tmp_path: Path) -> None:
    assert list(compose_run(["reward.scorers.colour=null"]).config.reward.scorers) == ["ocr"]
    (tmp_path / "mine.yaml").write_text("defaults: [signs]\nreward: {scorers: {ocr: null, sharpness: {}}}\n")
    assert list(compose_run([f"experiment={tmp_path / 'mine.yaml'}"]).config.reward.scorers) == ["sharpness"]
    with pytest.raises(ConfigError, match=r"reward\.scorers=null: .*dictionary"):
        compose_run(["reward.scorers=null"])


def test_other_prompts_have_held_out_prompts_of_their_own() -> None:
    assert compose_run([]).config.validation.data == "signs_val"
    for given, held_out in (
        (["data.train=mine.txt"], "auto"),
        (["data.train=mine.txt", "validation.data=others.txt"], "others.txt"),
        (["data.train=signs_train"], "signs_val"),
        (["validation.data=null", "data.train=mine.txt"], None),
        (["experiment=sd35_medium_ocr", "data.train=mine.txt"], "auto"),
        (["model.path=folder", "data.train=mine.txt"], "auto"),
    ):
        assert compose_run(given).config.validation.data == held_out, given


def test_no_reward_and_no_prompts_are_assumed() -> None:
    config = compose_run(["model.path=folder"]).config
    assert config.data.train is None and not config.reward.scorers


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
    assert (again.trainer.steps, again.sampling) == (4, compose_run(["experiment=plain"]).config.sampling)


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
    assert set(ALGORITHMS) <= set(shipped("algorithm"))


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
        (["algorithm.mix=1"], "algorithm.mix=1: awm does not read it", "only crd, diffusion_nft"),
        (
            ["algorithm=mix_grpo", "algorithm.mix=1"],
            "algorithm.mix=1: mix_grpo does not read it",
            "only crd, diffusion_nft",
        ),
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


MINE = """# @package _global_
defaults:
  - base
  - override /algorithm: special

trainer:
  steps: 7
"""
BASE = "# @package _global_\nactor:\n  lr: 0.007\n"
SPECIAL = "# @package _global_\nalgorithm:\n  name: flow_grpo\n  kl_coef: 0.5\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder laid out as Hydra wants it, with a space and a comma in its name."""
    top = tmp_path / "my files, it's"
    for name, text in {"experiment/mine": MINE, "experiment/base": BASE, "algorithm/special": SPECIAL}.items():
        file = top / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (top / "flat.yml").write_text(BASE)
    return top


@pytest.mark.parametrize("given", [["-m", "a.b=1,2"], ["a.b=1,2", "--multirun"]])
def test_a_sweep_is_asked_for_before_or_behind_the_keys(given: list[str]) -> None:
    options = hydra_options(given)
    assert options.multirun and not options.shown and options.arguments == ["a.b=1,2"]


@pytest.mark.parametrize("given", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_the_configuration_is_only_shown(given: list[str]) -> None:
    options = hydra_options(["trainer.steps=1", *given])
    assert options.shown and not options.multirun and options.arguments == ["trainer.steps=1"]


def test_without_options_arguments_are_left_as_they_are() -> None:
    given = ["experiment=signs", "~reward.scorers.ocr", "--typo", "+x=--cfg"]
    assert hydra_options(given).arguments == given


@pytest.mark.parametrize("name", ["mine", "mine.yaml"])
def test_an_experiment_of_a_folder_with_all_that_it_is_composed_from(name: str, folder: Path) -> None:
    options = hydra_options(["--config-dir", str(folder), f"experiment={name}", "trainer.seed=3"])
    composed = compose_run(options.arguments)
    config = composed.config
    assert (config.trainer.steps, config.trainer.seed, config.actor.lr) == (7, 3, 0.007)
    assert (config.algorithm.name, config.algorithm.kl_coef) == ("flow_grpo", 0.5)
    assert (composed.experiment, composed.preset) == ("mine", "")  # the preset is none of gerl's


def test_a_file_at_the_top_of_the_folder_and_one_of_gerl(folder: Path) -> None:
    flat = hydra_options(["experiment=flat", f"--config-dir={folder}"]).arguments
    assert compose_run(flat).config.actor.lr == 0.007
    shipped = hydra_options(["experiment=plain", "-cd", str(folder)]).arguments
    assert shipped[0] == "experiment=plain" and compose_run(shipped).experiment == "plain"


def test_a_preset_of_the_folder(folder: Path) -> None:
    composed = compose_run(hydra_options(["algorithm=special", "--config-dir", str(folder)]).arguments)
    assert (composed.config.algorithm.kl_coef, composed.preset, composed.experiment) == (0.5, "", "signs")
    for group, names in (("algorithm", "special"), ("experiment", "base, flat, mine")):
        with pytest.raises(ConfigError, match=rf"{group}=zzz: .*; it has {names}$"):
            hydra_options([f"{group}=zzz", "--config-dir", str(folder)])
    with pytest.raises(ConfigError, match=r"algorithm=speical: .*'special'"):
        hydra_options(["algorithm=speical", "--config-dir", str(folder)])


def test_the_other_commands_find_experiments_there_too(folder: Path, tmp_path: Path) -> None:
    given = ["--config-dir", str(folder), "experiment=mine"]
    assert preflight([*given, "algorithm=special"])[0].trainer.steps == 7
    assert scoring([*given, "images=x", "out=y"])[1].trainer.steps == 7
    prompts = tmp_path / "prompts.txt"
    scorers = "reward.scorers={sharpness: {}}"
    assert evaluation([*given, scorers, f"out={tmp_path}", f"prompts={prompts}"]).config.actor.lr == 0.007


def test_defaults_name_files_by_their_paths_too(folder: Path) -> None:
    other = folder / "other" / "mine.yaml"  # gerl, or the folder, may have others of these names
    other.parent.mkdir()
    other.write_text(
        "defaults:\n  - ../experiment/mine.yaml\n  - override /algorithm: ../algorithm/special.yaml\n"
        "  - _self_\ntrainer:\n  seed: 4\n"
    )
    config = compose_run([f"experiment={other}"]).config
    assert (config.trainer.steps, config.trainer.seed, config.algorithm.kl_coef) == (7, 4, 0.5)
    other.write_text("defaults:\n  - mien.yaml\n")
    with pytest.raises(ConfigError, match=r"defaults lists mien\.yaml, but there is no such file"):
        compose_run([f"experiment={other}"])


@pytest.mark.parametrize("given", [["-m", "a.b=1,2"], ["--cfg", "job"], ["a.b=1", "--cfg=job"]])
def test_what_only_training_has_is_said(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="only gerl train"):
        without_options(given)


def test_several_experiments_of_a_sweep(folder: Path) -> None:
    options = hydra_options(["-m", "experiment=mine,signs,flat", "--config-dir", str(folder)])
    names = [str(folder / "experiment" / "mine.yaml"), "signs", str(folder / "flat.yml")]
    assert options.arguments[0] == f"experiment={','.join(names)}"


def test_an_experiment_that_is_not_there_is_named_with_what_is(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"experiment=zebra: .*base, flat, mine"):
        hydra_options(["--config-dir", str(folder), "experiment=zebra"])
    with pytest.raises(ConfigError, match=r"experiment=sings: .*'signs'"):
        hydra_options(["--config-dir", str(folder), "experiment=sings"])


@pytest.mark.parametrize("text", ["a b", "it's", "1,2", "a=b", "[x]", "${now:}", "back\\slash", "end\\"])
def test_quoted_text_is_read_back_by_hydra(text: str) -> None:
    value = OverridesParser.create().parse_override(f"key={quoted(text)}").value()
    assert str(value) == text
