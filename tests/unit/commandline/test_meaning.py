"""A configuration means what it says: defaults, keys given twice, plain texts, `~KEY` and `${...}`."""

import re
import shlex
from pathlib import Path

import pytest

from gerl.commandline.composition import Composed, compose_run
from gerl.config import keys
from gerl.config.configuration import described
from gerl.config.reading import typed
from gerl.errors import ConfigError

LIBRARY = re.compile(
    r"full_key|object_type|hydra\.cc|hydra\.runtime|defaults list|Config search path|OmegaConf|resolving|\n|Traceback"
    r"|override must be|Could not"
)
PLAIN_TEXTS = [
    "промпты.txt", "一只猫.txt", "my prompts (1).txt", "a,b=c.txt", "it's.txt", 'say "hi".txt', "~/a.txt", "a:b.txt",
    "[a] b.txt", "{a}.txt", "a#b;c&d!.txt", "é ü (ß).txt", "50%.txt", "a+b@c.txt", "a  b.txt", "$HOME.txt", "🦊.txt",
]  # fmt: skip


@pytest.mark.parametrize("model", ["mymodel", "black-forest-labs/FLUX.1-dev", "~/models/x", "模型"])
def test_another_model_is_not_trained_with_the_settings_of_the_demo(model: str) -> None:
    composed = compose_run([f"model.path={model}", "data.train=cats.txt"])
    assert composed.experiment == "plain" and composed.config.model.path == model
    assert composed.config.sampling == compose_run(["experiment=plain"]).config.sampling


def test_a_named_experiment_or_the_demos_own_model_is_kept() -> None:
    assert compose_run(["model.path=signs"]).experiment == "signs"
    assert compose_run(["model.path=other", "experiment=signs"]).config.sampling.height == 32


def test_what_is_trained_is_one_line() -> None:
    line = described(compose_run(["model.path=other", "sampling.height=512", "sampling.width=768"]).config)
    for part in ("awm on other", "512 x 768", "4 steps", "guidance", "LoRA rank 32", "reward none"):
        assert part in line
    line = described(
        compose_run(["model.path=other", "model.train=full", "reward.scorers={a: {path: a.py, weight: 2}}"]).config
    )
    assert "own size" in line and "model.train=full" in line and "reward 2 a" in line and "\n" not in line


def test_scorers_of_the_default_experiment_are_named_with_the_way_to_be_rid_of_them() -> None:
    kept = compose_run(["reward.scorers.red.path=my file's.py", "reward.scorers.red.weight=2"]).kept
    assert "also has ocr, of" in kept and "experiment=signs" in kept
    alone = next(part for part in shlex.split(kept) if part.startswith("reward.scorers="))
    composed = compose_run([alone])
    assert list(composed.config.reward.scorers) == ["red"] and not composed.kept
    assert composed.config.reward.scorers["red"].path == "my file's.py"
    for given in (["reward.scorers.ocr.weight=2"], ["experiment=signs", "reward.scorers.red.path=r.py"]):
        assert not compose_run(given).kept


@pytest.mark.parametrize(
    "given",
    [
        "rollout.n=8 rollout.n=4",
        "rollout.n=8 ++rollout.n=4",
        "'trainer={steps: 3}' trainer.steps=4",
        "out=a hydra.run.dir=b",
        "reward.scorers.a.path=a.py 'reward.scorers.a={path: b.py}'",
    ],
)
def test_two_values_of_a_key_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="are both given: keep one"):
        compose_run(shlex.split(given))


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_a_plain_text_needs_no_quotes(text: str) -> None:
    assert compose_run(["experiment=plain", f"data.train={text}"]).config.data.train == text
    assert compose_run(["experiment=plain", f"sampling.call.x={text}"]).config.sampling.call == {"x": text}


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_what_is_printed_for_a_shell_composes(text: str) -> None:
    printed = typed({"hydra.run.dir": text, "reward.scorers": {"mine": {"path": text}}})
    composed = compose_run(["experiment=plain", *shlex.split(printed)])
    assert composed.run_dir == Path(text) and composed.config.reward.scorers["mine"].path == text


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_the_configuration_of_a_run_composes_to_itself(text: str, tmp_path: Path) -> None:
    first = compose_run([f"model.path={text}", f"data.train={text}", f"reward.scorers.mine.path={text}"])
    assert again(first, tmp_path).config == first.config


@pytest.mark.parametrize("line", ["algorithm=flow_grpo", "model.train=full", "reward.scorers={m: {path: a.py}}"])
def test_so_does_that_of_other_runs(line: str, tmp_path: Path) -> None:
    first = compose_run([line])
    assert again(first, tmp_path).config == first.config


def again(first: Composed, folder: Path) -> Composed:
    (folder / "config.yaml").write_text(first.yaml(), encoding="utf-8")
    return compose_run([f"experiment={folder / 'config.yaml'}"])


BLOCKS = sorted({name.split(".")[0] for name, _ in keys()} - {"algorithm"})
FIRST = [next(name for name, _ in keys() if name.startswith(f"{block}.")) for block in BLOCKS]


@pytest.mark.parametrize("name", [*BLOCKS, *FIRST, "model.train", "reward.scorers", "reward.scorers.ocr.replicas"])
def test_a_key_that_is_taken_away_has_its_default(name: str) -> None:
    assert not sentence([f"~{name}", "algorithm=flow_grpo", "experiment=sd35_medium_ocr"])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("~nope", "nope"),
        ("~trainer.stepz", "'trainer.steps'"),
        ("~reward.scorers.nope", "ocr, colour"),
        ("~algorithm", "algorithm=NAME"),
        ("~algorithm.name", "algorithm=NAME"),
        ("~experiment", "experiment=NAME"),
        ("~hydra", "hydra.run.dir"),
        ("~hydra.run.dir", "hydra.run.dir"),
        ("~trainer.steps=3", "~trainer.steps=3"),
        ("hydra=3", "hydra=3"),
        ("hydra.run=3", "hydra.run=3"),
        ("hydra.run.dir=null", "hydra.run.dir=null"),
        ("hydra/nope=x", "hydra/nope"),
        ("trainer.steps=${oc.env:NOPE}", "environment variable"),
        ("trainer.steps=${foo:1}", "oc.env"),
        ("trainer.steps=${actor.nope}", "'actor.nope'"),
        ("trainer.steps=${actor.lr", "}"),
        ("trainer.steps=${trainer.steps}", "trainer.steps"),
        ("trainer.steps=???", "trainer.steps=???"),
        ("hydra.run.dir=${nope}", "'nope'"),
        ("algorithm.name=null", "algorithm=NAME"),
        ("algorithm=null", "algorithm=null"),
        ("trainer=null", "trainer.steps"),
        ("defaults=[a]", "defaults"),
        ("trainer@x=3", "trainer"),
    ],
)
def test_no_text_of_a_library_reaches_the_user(given: str, named: str) -> None:
    said = sentence([given])
    assert named in said and not LIBRARY.search(said), said


@pytest.mark.parametrize(
    "content",
    [
        "defaults: [foo/bar]", "defaults: [nope]", "defaults: 3", "defaults: {a: b}", "defaults: [[a]]",
        "defaults: [override /nope: x]", "defaults: [override /algorithm: nope]", "defaults: [{a: {b: c}}]",
        "defaults: [null]", "trainer: {steps: '${nope}'}", "trainer: {steps: ???}", "trainer: 3", "algorithm: null",
        "algorithm: {name: null}", "3: 4", "- a", "reward: {scorers: 3}", "trainer: [1]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("group", ["experiment", "algorithm"])
def test_a_wrong_file_is_one_sentence(group: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content + "\n")
    said = sentence([f"{group}={tmp_path / 'mine.yaml'}"])
    assert said and not LIBRARY.search(said), said


def test_a_preset_without_its_block_is_told_which_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("clip_low: 1e-4\n")
    said = sentence([f"algorithm={tmp_path / 'mine.yaml'}"])
    assert "algorithm.name" in said and "'algorithm:'" in said and "mine.yaml" in said


def sentence(arguments: list[str]) -> str:
    """What is said of a command line that is refused; empty for one that is taken."""
    try:
        compose_run(arguments)
    except ConfigError as error:
        return str(error)
    return ""
