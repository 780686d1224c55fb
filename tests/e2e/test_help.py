"""The commands before they start: their help, and how soon a wrong key is said."""

import importlib
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "torch",
    "diffusers",
    "ray",
    "transformers",
    "peft",
    "matplotlib",
    "scipy",
    "torchvision",
    "fastapi",
    "starlette",
}
COMMANDS = {  # the module, and where its command line is
    "gerl.trainer.main_flowgrpo": "gerl.trainer.main_flowgrpo",
    "gerl.score": "gerl.score.command",
    "gerl.evaluate": "gerl.evaluate.command",
    "gerl.export": "gerl.export.command",
    "gerl.preflight": "gerl.preflight.arguments",
    "gerl.trainer.replay": "gerl.trainer.replay",
    "gerl.verify": "gerl.verify.command",
    "gerl.run.report": "gerl.run.report",
    "gerl.watch": "gerl.web.watch",
    "reward_models.serve": "reward_models.serve",
    "gerl.vote": "reward_models.votes.command",
}
# What each says before anything large is imported: a missing key, or a value that cannot be.
MISSING = {
    "gerl.trainer.main_flowgrpo": (["data.train=nowhere.txt"], "data.train=nowhere.txt: "),
    "gerl.score": ([], "images is missing"),
    "gerl.evaluate": (["lora=nowhere", "out=x"], "lora=nowhere: "),
    "gerl.export": (["run=nowhere", "out=x"], "run=nowhere "),
    "gerl.preflight": (["out=nowhere.txt"], "out=nowhere.txt: "),
    "gerl.trainer.replay": (["nowhere.json"], "dump=nowhere.json "),
    "gerl.verify": (["run=nowhere"], "run=nowhere "),
    "gerl.run.report": ([], "run is missing"),
    "gerl.watch": (["port=many"], "port=many: "),
    "reward_models.serve": ([], "scorer is missing"),
    "gerl.vote": (["serve_only=true"], "folder is missing"),
}


def run(module: str, *arguments: str) -> tuple[int, str, str, set[str], float]:
    """Exit code, both outputs, the heavy packages that were imported, and the seconds of CPU, of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = set(re.findall(r"^import time:.*\|\s*(\w+)$", done.stderr, re.MULTILINE))
    message = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("import time:"))
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert "argparse" in imported or "logging" in imported  # the list is not empty
    return done.returncode, done.stdout, message, imported & HEAVY, seconds


@pytest.mark.parametrize("module", COMMANDS)
def test_help_a_typo_and_a_missing_key_are_answered_before_anything_large_is_imported(module: str) -> None:
    arguments, named = MISSING[module]
    asked = {"help": ["--help"], "typo": ["zebra.crossing=1"], "missing": arguments}
    answers = {name: run(module, *given) for name, given in asked.items()}
    assert {name: (code, heavy) for name, (code, _, _, heavy, _) in answers.items()} == {
        "help": (0, set()),
        "typo": (2, set()),
        "missing": (1 if named.startswith("data.train") else 2, set()),
    }, answers
    assert answers["help"][1].startswith("usage: python -m " + module)
    for name, what in (("typo", "zebra.crossing: "), ("missing", named)):
        assert answers[name][2].startswith(f"error: {what}") and answers[name][2].count("\n") == 1, answers[name]
    assert all(seconds < 4 for *_, seconds in answers.values()), answers  # about 0.5 on a machine of 2026


SENDS = """
import os, runpy, signal, sys

class Sends:  # the signal comes with the first import of something large
    def find_spec(self, name, path=None, target=None):
        if name == "pydantic":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Sends())
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("argument", ["--help", "zebra.crossing=1"])
@pytest.mark.parametrize("module", COMMANDS)
def test_ctrl_c_while_a_command_is_imported_is_one_sentence(module: str, argument: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SENDS, module, argument]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stderr.removeprefix("INFO gerl: ")  # of a command whose log has levels
    assert (done.returncode, done.stdout, said) == (130, "", "stopped by SIGINT\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("gerl.score", "images prompts out batch reward.scorers.NAME.weight data.prompt_key geneval"),
        ("gerl.evaluate", "lora.NAME= images out validation.micro_batch_size"),
        ("gerl.export", "run out format weights step overwrite diffusers)"),
        ("gerl.preflight", "experiment=NAME|FILE.yaml out=FILE.json"),
        ("gerl.run.report", "run=FOLDER"),
        ("reward_models.serve", "scorer=NAME host token_env"),
        ("gerl.vote", "voters votes host port undo lease serve_only folder"),
    ],
)
def test_help_explains_every_key(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(COMMANDS[command]).main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words.split()) and all(len(line) <= 250 for line in text.splitlines())
    assert command == "gerl.preflight" or "trainer." not in text


@pytest.mark.parametrize("module", COMMANDS)
def test_help_shows_choices_as_they_are_typed(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(COMMANDS[module]).main(["--help", "all"]) == 0
    assert not re.findall(r"typing\.\w+|Literal|<class|dataclass", capsys.readouterr().out)
