"""An algorithm in a file of the user, `algorithm.path`: trained, resumed, over Ray, and what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drills import more

from gerl.algorithms import ALGORITHMS, build_algorithm
from gerl.commandline.composition import compose_run
from gerl.commandline.help import help_text
from gerl.errors import ConfigError
from gerl.trainer.main_flowgrpo import main

Arguments = Callable[..., list[str]]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "my_algorithm.py"
SUITS = "algorithm.width=0.5 checkpoint.every=1 reward.trial=false sampling.window_range=[0,2]".split()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example, as a file that may be changed; later tests do not find it in the registry."""
    monkeypatch.setattr(ALGORITHMS, "_own", {})
    monkeypatch.setattr(ALGORITHMS, "_by_path", {})
    file = tmp_path / "smooth.py"
    file.write_text(EXAMPLE.read_text())
    return file


def rewards(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / f"checkpoints/step_{step}/lora/pytorch_lora_weights.safetensors")


@more
def test_it_trains_over_ray_as_in_process_and_is_resumed(arguments: Arguments, own: Path, tmp_path: Path) -> None:
    path = f"algorithm.path={own}"
    local, ray, part = tmp_path / "local", tmp_path / "ray", tmp_path / "part"
    assert main(arguments(local, path, *SUITS)) == 0
    over_ray = ["cluster.launcher=ray", "cluster.num_workers=2"]
    assert main(arguments(ray, path, *SUITS, *over_ray)) == 0
    assert rewards(local) == pytest.approx(rewards(ray), rel=1e-4)
    assert (ray / "smooth.py").read_text() == own.read_text()
    assert main(arguments(part, path, *SUITS, "trainer.steps=1")) == 0
    own.unlink()  # the run has a copy, which its owner names
    assert main([f"checkpoint.resume={part}", "trainer.steps=2"]) == 2
    assert main([f"checkpoint.resume={part}", "trainer.steps=2", f"algorithm.path={part / 'smooth.py'}"]) == 0
    whole, resumed = weights(local, 2), weights(part, 2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_changed_file_is_not_resumed(
    arguments: Arguments, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(arguments(folder, f"algorithm.path={own}", *SUITS)) == 0
    own.write_text(own.read_text().replace("-advantages", "advantages"))
    assert main([f"checkpoint.resume={folder}", "trainer.steps=3"]) == 1
    assert "algorithm.path" in capsys.readouterr().err


def test_its_keys_are_known(own: Path) -> None:
    path = f"algorithm.path={own}"
    composed = compose_run([path, "algorithm.width=3"])
    assert (composed.preset, composed.config.algorithm.name) == ("flow_grpo", "smooth")
    assert composed.config.rollout == compose_run(["algorithm=flow_grpo"]).config.rollout
    assert type(build_algorithm(composed.config)).__name__ == "Smooth" and "smooth" in ALGORITHMS
    for wrong, named in (("algorithm.widht=1", "did you mean 'algorithm.width'"), ("algorithm.width=0", "width=0")):
        with pytest.raises(ConfigError, match=named):
            compose_run([path, wrong])
    assert "  algorithm.width=0.0002" in help_text("PROGRAM", ["--help", path])
    assert (
        compose_run(["algorithm=mix_grpo", path]).config.sampling == compose_run(["algorithm=mix_grpo"]).config.sampling
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = 1", "defines no algorithm"),
        ("from gerl.algorithms import ForwardProcess\nclass Mine(ForwardProcess): pass", r"def loss\(self, s\)"),
        ("from gerl.algorithms.awm import AWM\nclass A(AWM): pass\nclass B(AWM): pass", "A and B"),
        ("from gerl.algorithms.awm import AWM\nclass A(AWM): names = 'crd'", "crd"),
        ("1/0", "ZeroDivisionError"),
        ("", "defines no algorithm"),
        (None, "there is no Python file"),
    ],
)
def test_a_file_that_is_no_algorithm(text: str | None, named: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=rf"algorithm\.path=.*mine\.py: .*{named}"):
        compose_run([f"algorithm.path={file}"])


def test_another_process_gets_the_source(own: Path, tmp_path: Path) -> None:
    import copy

    settings = compose_run([f"algorithm.path={own}"]).config.algorithm
    own.unlink()
    assert copy.deepcopy(settings) == settings  # as over Ray: by its text
