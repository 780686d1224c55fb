"""Hydra's own options: what they are taken for, and experiments in a folder of one's own."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gerl.commandline.composition import compose_run
from gerl.commandline.hydra_options import files_in, hydra_options, quoted, without_options
from gerl.errors import ConfigError
from gerl.evaluate.command import parse as evaluation
from gerl.preflight.arguments import parse as preflight
from gerl.score.command import parse as scoring

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
    assert files_in("algorithm", folder) == ["special"] and files_in("experiment", folder) == ["base", "flat", "mine"]
    with pytest.raises(ConfigError, match=r"algorithm=speical: .*'special'"):
        hydra_options(["algorithm=speical", "--config-dir", str(folder)])


def test_the_other_commands_find_experiments_there_too(folder: Path, tmp_path: Path) -> None:
    given = ["--config-dir", str(folder), "experiment=mine"]
    assert preflight([*given, "algorithm=special"])[0].trainer.steps == 7
    assert scoring([*given, "images=x", "out=y"])[1].trainer.steps == 7
    prompts = tmp_path / "prompts.txt"
    assert evaluation([*given, f"out={tmp_path}", f"prompts={prompts}"]).config.actor.lr == 0.007


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
