"""The program gerl: its commands are found, named in their help, and answered before anything large is imported."""

import os
import re
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gerl.program.commands import COMMANDS, main, overview

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "diffusers", "ray", "transformers", "peft", "matplotlib", "hydra", "pydantic", "numpy"}


def start(*arguments: str) -> tuple[int, str, str, set[str], float]:
    """Exit code, both outputs, heavy packages that were imported, and seconds of CPU, of `python -m gerl`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "-m", "gerl", *arguments]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = set(re.findall(r"^import time:.*\|\s*(\w+)$", done.stderr, re.MULTILINE))
    said = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("import time:"))
    assert "difflib" in imported  # the list is not empty
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stdout, said, imported & HEAVY, seconds


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_overview_has_a_sentence_for_each_command_and_comes_at_once(arguments: tuple[str, ...]) -> None:
    code, out, said, heavy, seconds = start(*arguments)
    assert (code, out, said, heavy) == (0, overview(), "", set())
    assert seconds < 1  # about 0.05
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.sentence[:40])}", out, re.M) and command.sentence.endswith(
            "."
        )
    assert max(map(len, out.splitlines())) <= 110


def test_a_mistyped_command_is_said_at_once() -> None:
    code, out, said, heavy, _ = start("scroe", "images=x")
    assert (code, out, heavy) == (2, "", set())
    assert said == "error: scroe: there is no such command; did you mean 'score'?\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_usage_of_a_command_names_it_as_it_was_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: gerl {name} ")
    assert main(["help", name]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_module_of_a_command_is_there(name: str) -> None:
    assert find_spec(COMMANDS[name].module) is not None


def test_version_may_be_asked_for_by_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gerl ")
