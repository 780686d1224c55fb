"""The README and the pages in docs are true: Python runs, commands compose, make targets, links and files exist.

A Python block is executed as it stands unless an HTML comment `<!-- not run: reason -->` stands before it.
"""

import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from drills import more
from PIL import Image
from tables import each
from zoo.text_to_image import sdxl

from gerl.commandline.composition import compose_run, hydra_options
from gerl.config.changes import flat_settings
from gerl.errors import GerlError
from gerl.evaluate import command as evaluate
from gerl.export import command as export
from gerl.preflight import arguments as preflight
from gerl.program import commands as program
from gerl.run import report
from gerl.score import command as score
from gerl.trainer import main_flowgrpo as train
from gerl.trainer import sweep
from gerl.trainer.run_folder import read_configuration
from reward_models import serve

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TRAIN = "python -m gerl.trainer.main_flowgrpo"
HUB_MODEL = "black-forest-labs/FLUX.1-dev"  # of a block that is run with the model that ships with gerl
FILE = re.compile(r"# ([\w-]+\.(?:yaml|py))\n")  # the first line of a block that is a file


class Block(NamedTuple):
    """A fenced block, and the reason why it is not executed, if one is given before it."""

    line: int
    language: str
    text: str
    not_run: str | None


def blocks(document: Path = README) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    fence = r"(?:<!-- not run: (?P<why>.+?) -->\s*)?^```(?P<language>\w*)\n(?P<text>.*?)^```"
    for match in re.finditer(fence, text, re.M | re.S):
        line = text[: match.start("text")].count("\n") + 1
        yield Block(line, match["language"], match["text"], match["why"])


def commands(document: Path = README) -> Iterator[tuple[int, str]]:
    """(line, command) of the bash blocks, without comments, continued lines joined."""
    for block in blocks(document):
        if block.language in ("bash", "sh", "console"):
            for number, line in enumerate(block.text.replace("\\\n", "  ").splitlines()):
                if command := re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ").strip():
                    yield block.line + number, command


PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY"))]
LINKING += sorted(page for name in ("benchmarks", "gerl", "reward_models") for page in (ROOT / name).rglob("*.md"))
PYTHON = [b for page in LINKING for b in blocks(page) if b.language == "python"]
YAML = [b for page in LINKING for b in blocks(page) if b.language == "yaml"]
SHELL = [(page, b) for page in LINKING for b in blocks(page) if b.language in ("bash", "sh", "console")]
TRAINING = [
    (line, command.removeprefix(TRAIN).removeprefix("gerl train"))
    for page in LINKING
    for line, command in commands(page)
    if command.startswith((TRAIN, "gerl train")) and not re.search(r" -m |--(help|cfg)", command)
]


def test_the_pages_have_what_is_checked_here() -> None:
    assert not [page.name for page in PAGES if "@@" in page.read_text(encoding="utf-8")], "a placeholder was left in"
    assert PYTHON and TRAINING
    assert {"make demo", "make test"} <= {command for _, command in commands()}


def test_own_pipeline_reward_and_prompts_are_a_few_lines() -> None:
    (block,) = (b.text for b in blocks() if "gerl.train(" in b.text)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10 and HUB_MODEL in block


def test_the_numbers_of_the_demo_are_on_record() -> None:
    first, *_, last = json.loads((ROOT / "benchmarks/results/demo.json").read_text())["validation"]
    said = " ".join(README.read_text(encoding="utf-8").split())
    assert f"reward rises from {first['reward']:.3f} to {last['reward']:.3f}" in said
    exact = f"from {first['exact']:.0%} to {last['exact']:.0%}, in {last['step']} steps".replace("%", " %")
    assert f"exactly read signs {exact}" in said


FAMILIES: dict[str, Any] = {
    "flux": tiny.flux, "sd3": tiny.sd3, "sdxl": sdxl, "sd15": tiny.sd15, "qwen_image": tiny.qwen_image
}  # fmt: skip
QUICK: dict[str, Any] = {
    "sampling.height": 32, "sampling.width": 32, "rollout.prompts_per_step": 2, "rollout.n": 4, "model.lora_rank": 4,
    "cluster.threads_per_worker": 1, "logger.progress": False, "logger.tensorboard": False,
}  # fmt: skip
OTHERWISE = {  # where a function is not in a file, and a pipeline in memory has its precision
    "model.dtype", "reward.scorers.bright.path", "cluster.launcher", "cluster.num_workers"
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("one_core")
def test_the_first_program_and_the_first_command_train_every_family_alike(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, run_of: Any
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    prompts = [f"a fox with {number} tails" for number in range(20)]
    Path("my_prompts.txt").write_text("\n".join(prompts))
    FAMILIES[family]().to(torch.bfloat16).save_pretrained("pipeline")
    (block,) = (b.text for b in blocks() if "gerl.train(" in b.text)
    (command,) = (c for _, c in commands() if c.startswith("gerl train model.path="))
    program = block.replace(HUB_MODEL, "pipeline").replace("steps=100", f"steps=2, out='python', **{QUICK}")
    values: dict[str, Any] = {"__name__": "readme"}
    with caplog.at_level("INFO", logger="gerl"):
        exec(compile(program, "README", "exec"), values)
        first = next(m for m in caplog.messages if "trainer steps" in m)
    assert (
        "awm_fast" in first
        and "18 prompts to train on and 2 held out" in first
        and Image.open("after.png").size[0] > 32
    )

    given = ["trainer.steps=2", *(f"{key}={value}" for key, value in QUICK.items())]
    given += ["hydra.run.dir=command", "model.dtype=bfloat16", "cluster.launcher=local"]
    assert train.main([*shlex.split(command.replace(HUB_MODEL, "pipeline"))[2:], *given]) == 0
    settings = [flat_settings(read_configuration(Path(name) / "config.yaml")[0]) for name in ("python", "command")]
    assert {key for key, value in settings[0].items() if settings[1][key] != value} <= OTHERWISE
    run_of(Path("python")).assert_same(run_of(Path("command")), 2)

    tutorial = ROOT / "docs" / "tutorial.md"
    (reward,) = (b.text for b in blocks(tutorial) if b.text.startswith("# my_reward.py\n"))
    Path("my_reward.py").write_text(reward)
    (command,) = (c for _, c in commands(tutorial) if c.startswith("gerl train model.path="))
    own = re.sub(r"model\.path=\S+", "model.path=pipeline", command)
    assert train.main([*shlex.split(own)[2:], *given[:-3], "hydra.run.dir=tutorial", *given[-2:]]) == 0


@more
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"line {block.line}")
@pytest.mark.usefixtures("one_core")
def test_python_blocks_run(
    block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("gerl", "examples"):  # as in a checkout, but what a block writes does not land in it
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    Path("my_prompts.txt").write_text("\n".join(f"a red fox, {number}" for number in range(20)))
    text = block.text.replace(HUB_MODEL, "gerl/assets/signs").replace("steps=100", "steps=2")  # no hub, and sooner
    code = compile(text, f"block at line {block.line}", "exec")
    if block.not_run is None:
        values: dict[str, Any] = {"__name__": "readme"}
        exec(code, values)
        if "optimizer.step()" in block.text:  # the text after it says 0.91
            assert values["rewards"].mean() > 0.8
        if "my_images" in block.text:
            place = ROOT / "docs" / "write_a_reward.md"
            _, _, page = place.read_text(encoding="utf-8").partition("# two scorers, one only watched\n")
            [command] = [c for _, c in commands(place) if "reward.scorers.sharpness.weight=0" in c]
            assert command.startswith("gerl score my_images ")
            caplog.set_level("INFO", logger="gerl")
            assert score.main(shlex.split(command)[2:]) == 0
            shown, said = table(page), table(caplog.messages[-1])
            assert list(shown) == list(said)
            for name, numbers in shown.items():  # another machine may draw other last bits
                assert numbers[:2] == pytest.approx(said[name][:2], abs=0.05)


def table(text: str) -> dict[str, list[float]]:
    """The numbers of the first table in the text, as `gerl.score` prints it, by column: images, mean, and so on."""
    rows = re.search(r" images .* max\n((?:\w.*\n)+)", text)
    assert rows is not None
    cells = [re.split(r"  +", line) for line in rows[1].splitlines()]
    return {name: [float(number) for number in numbers] for name, *numbers in cells}


@pytest.fixture
def named_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, with the shipped examples and the blocks of the pages that begin with `# NAME`."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in [*YAML, *PYTHON]:
        if name := FILE.match(block.text):
            (tmp_path / name[1]).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_experiment_files_compose(named_files: Path) -> None:
    files = sorted(named_files.glob("*.yaml"))
    assert len(files) >= 3
    for file in files:
        scorers = compose_run([f"experiment={file.name}"]).config.reward.scorers
        assert all(Path(scorer.path).is_file() for scorer in scorers.values() if scorer.path)


@each(("line", "keys"), TRAINING, every=20)
@pytest.mark.usefixtures("named_files")
def test_training_commands_compose(line: int, keys: str) -> None:
    scorers = compose_run(shlex.split(keys)).config.reward.scorers
    assert all(Path(scorer.path).is_file() for scorer in scorers.values() if scorer.path)


@pytest.mark.parametrize("block", [b for b in YAML if not FILE.match(b.text)], ids=lambda block: f"line {block.line}")
@pytest.mark.usefixtures("named_files")
def test_parts_of_experiment_files_compose(block: Block) -> None:
    Path("part.yaml").write_text(f"# a part of an experiment file\n{block.text}")
    assert compose_run(["experiment=part.yaml"]).experiment


def test_shell_blocks_are_shell_and_what_they_start_is_there() -> None:
    assert len(SHELL) > 40
    text = "\n".join(f"( # {page.name}, line {block.line}\n{block.text}\n)" for page, block in SHELL)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    named = re.findall(r"(?<![\w/])examples/[\w./-]+\.(?:sh|py|yaml|ipynb)", text)
    assert len(named) > 5 and not [path for path in named if not (ROOT / path).is_file()]


ANSWERED = [  # a command and its answer, as a terminal shows them
    match.groups()
    for page in LINKING
    for block in blocks(page)
    if not block.language and (match := re.fullmatch(r"\$ (.+)\nerror: (.+)\n", block.text))
]


@pytest.mark.parametrize(("command", "answer"), ANSWERED)
def test_wrong_commands_are_answered_as_shown(command: str, answer: str) -> None:
    with pytest.raises(GerlError) as raised:
        compose_run(shlex.split(command.removeprefix(TRAIN).removeprefix("gerl train")))
    assert str(raised.value) == answer


def test_the_command_that_logs_in_to_the_hub_exists() -> None:
    login = re.search(r"`(hf auth login)`", README.read_text(encoding="utf-8"))
    assert login is not None
    program, *arguments = login[1].split()
    assert subprocess.run([Path(sys.executable).with_name(program), *arguments, "--help"], check=False).returncode == 0


def test_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    places = [*PAGES, *sorted((ROOT / "reward_models").rglob("*.md"))]
    named = {
        extra
        for page in places
        for group in re.findall(r"gerl\[([a-z,]+)\]", page.read_text())
        for extra in group.split(",")
    }
    assert named <= set(extras)
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.M)
    assert {extra for row in rows for extra in re.findall(r"\w+", row)} == set(extras)


PARSERS = {
    "gerl.score": score.PARSER,
    "gerl.evaluate": evaluate.PARSER,
    "gerl.export": export.PARSER,
    "gerl.preflight": preflight.PARSER,
    "gerl.run.report": report.PARSER,
    "reward_models.serve": serve.PARSER,
}
OTHERS = [
    (line, module, arguments)
    for page in [*PAGES, *sorted((ROOT / "reward_models").rglob("*.md"))]
    for line, command in commands(page)
    if (words := re.fullmatch(r"(?:\S+/)?python -m (\S+) ?(.*)", command)) and command.split()[2] in PARSERS
    for module, arguments in [words.groups()]
]


@each(("line", "module", "arguments"), OTHERS, every=5)
@pytest.mark.usefixtures("named_files")
def test_other_commands_have_these_keys(line: int, module: str, arguments: str) -> None:
    _, overrides = PARSERS[module].values(shlex.split(arguments))
    if not any("mine.yaml" in override for override in overrides):  # a file of the reader's
        assert compose_run(overrides)


def test_every_command_has_examples() -> None:
    modules = {program.COMMANDS[arguments[0]].module for _, arguments in PROGRAM if arguments[0] in program.COMMANDS}
    found = {module for _, module, _ in OTHERS} | modules
    assert all(
        any(name in (module, f"{module}.__main__") or name.startswith(f"{module}.") for name in found)
        for module in PARSERS
    )


PROGRAM = [
    (line, shlex.split(command)[1:])
    for page in [*PAGES, *sorted((ROOT / "reward_models").rglob("*.md"))]
    for line, command in commands(page)
    if command.startswith("gerl ")
]


@each(("line", "arguments"), PROGRAM, every=20)
@pytest.mark.usefixtures("named_files")
def test_commands_of_the_program_have_these_keys(line: int, arguments: list[str]) -> None:
    """The words behind `gerl`; plugins of Hydra that are not installed are left out of a sweep."""
    name, *given = arguments[: arguments.index(">")] if ">" in arguments else arguments
    if "--help" in given:
        assert program.COMMANDS[name]
    elif name == "train":
        options = hydra_options(given)
        if not options.multirun:
            assert compose_run(options.arguments)
            return
        plan = sweep._plan([key for key in options.arguments if not key.startswith("hydra/launcher")])
        assert plan.batch is None or [compose_run(sweep._arguments(run, plan)) for run in plan.batch]
    else:
        serves_pipeline = name == "serve" and any(argument.startswith("pipeline=") for argument in given)
        module = "gerl.web.engine" if serves_pipeline else program.COMMANDS[name].module
        importlib.import_module(module).PARSER.values(given)


def test_the_page_of_commands_has_them_all() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(program.COMMANDS) == set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert len(PROGRAM) > 10


def test_make_targets_exist() -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    targets = [command.split()[1] for _, command in commands() if command.startswith("make ")]
    assert targets and set(targets) <= set(rules)


def test_modules_that_are_run_exist() -> None:
    modules = [m for page in PAGES for m in re.findall(r"python -m (gerl[\w.]*)", page.read_text(encoding="utf-8"))]
    places = [ROOT.joinpath(*module.split(".")) for module in modules]
    assert places and all(p.with_suffix(".py").is_file() or (p / "__main__.py").is_file() for p in places), modules


@each("page", LINKING)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, and where a link names a heading, to that heading."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(\s*([^)\s]+)\s*\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if link.startswith(("http", "data:")):
            continue
        name, _, anchor = link.partition("#")
        place = page.parent / name if name else page
        assert place.exists(), link
        assert not anchor or anchor in anchors(place), link


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each("page", LINKING)
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "gerl|tests|configs|docs|examples|benchmarks|reward_models"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text("utf-8"))
    assert not [path for path in named if "NAME" not in path and not (ROOT / path).exists()]
