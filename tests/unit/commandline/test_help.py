"""The help of training: the most used keys of an algorithm, or every key of all of them."""

import pytest

from gerl.commandline.composition import compose_run, experiments, shipped
from gerl.commandline.help import help_text
from gerl.config import keys, readers
from gerl.config.registry import ALGORITHMS


def explanation(text: str, start: str) -> list[str]:
    """The lines below those that begin with `start`."""
    lines = text.splitlines()
    return [lines[i + 1].strip() for i, line in enumerate(lines) if line.startswith(start)]


def test_all_explains_every_key_and_says_who_reads_it() -> None:
    text = help_text("PROGRAM", ["--help", "all"])
    assert text.startswith("usage: PROGRAM")
    for name, f in keys():
        found = explanation(text, f"  {name}=")
        assert any(line.startswith(f.metadata["help"]) for line in found), name
        # those with a default for each family
        several = "cfg beta teachers reference active bias rescale nested tau path".split()
        assert len(found) == 1 or name.removeprefix("algorithm.") in several
        if 0 < len(who := readers(name.partition(".")[2])) < len(ALGORITHMS):
            assert name.split(".")[0] != "algorithm" or all(any(one in line for line in found) for one in who)
    for name in (*experiments(), *shipped("algorithm")):
        assert name in text
    assert "  validation.every=10\n" in text and "  cluster.num_workers=null\n" in text
    assert "  model.compile=null\n" in text and "  cluster.launcher=ray (ray|local)\n" in text
    assert "  cluster.device=auto (auto|cpu|cuda)\n" in text
    assert explanation(text, "  algorithm.mix=1.0") == [
        "b: distance of the implicit policies from the old one [crd, diffusion_nft]"
    ]


@pytest.mark.parametrize("name", shipped("algorithm"))
def test_help_shows_the_most_used_keys_of_the_chosen_algorithm(name: str) -> None:
    text = help_text("PROGRAM", ["--help", f"algorithm={name}"])
    algorithm = compose_run(["experiment=plain", f"algorithm={name}"]).config.algorithm
    listed = [line.split("=")[0].strip() for line in text.splitlines() if line.startswith("  ") and "=" in line]
    listed = [key for key in listed if "." in key and " " not in key and key not in ("hydra.run.dir", "algorithm.path")]
    often = [key for key, f in keys(type(algorithm)) if f.metadata["often"]]
    assert listed == often and len(often) <= 40
    assert f"  algorithm.kl_coef={algorithm.kl_coef}\n" in text  # as the preset has it
    assert "--help all" in text


def test_without_an_algorithm_help_is_that_of_the_default_one() -> None:
    text = help_text("PROGRAM")
    assert "  algorithm.name=awm\n" in text and "  algorithm.timesteps=1\n" in text
    assert "algorithm.critic" not in text and "sampling.compression" not in text
    assert text == help_text("PROGRAM", ["-h", "algorithm=nope", "trainer.steps=3"])
