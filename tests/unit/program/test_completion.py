"""Completion: the words that fit, and that shells which are installed here show them."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gerl.commandline.composition import shipped
from gerl.program.commands import COMMANDS
from gerl.program.completion import SCRIPTS
from gerl.program.words import fitting

ROOT = Path(__file__).resolve().parents[3]


def words(*given: str) -> list[str]:
    return [word for word, _ in fitting(given)]


def test_commands_and_what_they_do() -> None:
    assert words("") == list(COMMANDS) == words()
    assert fitting(["pref"])[0][1].startswith("Report whether")
    assert words("zebra", "") == []


def test_blocks_first_then_their_keys() -> None:
    blocks = words("train", "")
    assert {"experiment=", "algorithm=", "model.", "trainer.", "hydra.run.dir=", "-m"} <= set(blocks)
    assert "trainer.steps=" not in blocks and len(blocks) < 25
    assert words("train", "model.quant") == ["model.quantize=", "model.quantize_encoders="]
    assert words("train", "reward.") and "reward.scorers." in words("train", "reward.")
    assert {"reward.scorers.ocr.", "reward.scorers.pickscore."} <= set(words("train", "reward.scorers."))
    assert words("train", "reward.scorers.ocr.wei") == ["reward.scorers.ocr.weight="]
    assert words("train", "-m", "") and "-m" not in words("train", "-m", "")


def test_an_algorithm_has_its_own_keys() -> None:
    assert "algorithm.mix=" in words("train", "algorithm=diffusion_nft", "algorithm.")
    assert "algorithm.mix=" not in words("train", "algorithm=flow_grpo", "algorithm.")


def test_values_of_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words("train", "algorithm=flow_grpo") == ["algorithm=flow_grpo", "algorithm=flow_grpo_fast"]
    assert words("train", "experiment=") == [f"experiment={name}" for name in shipped("experiment")]
    assert words("train", "cluster.launcher=") == ["cluster.launcher=ray", "cluster.launcher=local"]
    assert words("train", "logger.report=t") == ["logger.report=true"]
    assert words("export", "format=m") == ["format=merged"] and words("export", "overwrite=") != []
    assert words("recipes", "sign") == ["signs"] and words("completion", "") == [
        "bash",
        "zsh",
        "fish",
        "shell=",
        "--help",
    ]
    assert words("train", "--cfg", "") == ["job"]
    assert words("train", "data.train=") == words("train", "trainer.steps=") == []  # files are the shell's
    (tmp_path / "mine.yaml").touch()
    assert words("preflight", "experiment=mi") == ["experiment=mine.yaml"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mint.yaml").touch()
    assert words("evaluate", "--config-dir", "there", "experiment=mi") == ["experiment=mint", "experiment=mine.yaml"]
    assert words("score", "--c") == ["--config-dir"] and words("export", "--c") == []
    assert words("train", "--config-dir", "") == []


def test_other_commands_have_the_keys_that_they_take() -> None:
    assert words("export", "fo") == ["format="] and "model." not in words("export", "")
    assert {"lora=", "out=", "sampling.", "experiment="} <= set(words("evaluate", ""))
    assert {"scorer=", "port="} <= set(words("serve", "")) and "reward." not in words("serve", "")
    assert "trainer." in words("preflight", "") and "hardware=" in words("preflight", "")


def test_words_come_without_torch() -> None:
    code = "import sys; from gerl.program.words import fitting; fitting(['evaluate', '']); "
    code += "sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A program gerl on the path."""
    program = tmp_path / "bin" / "gerl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gerl "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TERM": "dumb", "PS1": "$ "}


START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(gerl completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u; eval "$(gerl completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "gerl completion fish | source"),
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_real_shell_completes_a_command_line(shell: str, environment: dict[str, str]) -> None:
    """Parts of words and tabs are typed, and the shell shows whole words."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command, begin = START[shell]
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, environment)
    try:
        type_in(terminal, "echo rea''dy\n", until="ready\r")
        type_in(terminal, f"{begin}; echo load''ed\n", until="loaded\r")
        type_in(terminal, "gerl tr\t", until="gerl train")
        type_in(terminal, "experiment=sd35_m\t", until="sd35_medium_ocr")
        type_in(terminal, "algorithm=awm_f\t", until="awm_fast")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def type_in(terminal: int, text: str, until: str) -> None:
    """Type, and wait for what the shell then shows."""
    os.write(terminal, text.encode())
    shown, end = "", time.monotonic() + 30
    while until not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
