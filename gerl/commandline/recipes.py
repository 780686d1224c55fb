"""The experiments that ship with gerl."""

from itertools import takewhile
from typing import NamedTuple

from gerl.commandline.composition import compose_run, config_folder, experiments
from gerl.commandline.form import either, near_names
from gerl.errors import ConfigError


class Recipe(NamedTuple):
    """A row of the table of recipes: a shipped experiment and the first sentence of its file."""

    name: str
    model: str
    algorithm: str
    reward: str
    sentence: str


def text_of(name: str) -> str:
    """Read the file of a shipped experiment; raises `ConfigError` for an unknown name."""
    if name not in experiments():
        near = near_names(name, experiments())
        hint = f"did you mean {either(near)}?" if near else f"choose one of {', '.join(experiments())}"
        raise ConfigError(f"name={name}: gerl has no such experiment; {hint}")
    return (config_folder() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")


def recipe(name: str) -> Recipe:
    """Compose a shipped experiment into a row; its sentence is the first one of the file's comment."""
    composed = compose_run([f"experiment={name}"])
    reward = ", ".join(composed.config.reward.scorers)
    comment = takewhile(lambda line: line.startswith("# "), text_of(name).splitlines()[1:])  # below @package
    sentence = " ".join(line.removeprefix("# ") for line in comment).partition(". ")[0].removesuffix(".")
    return Recipe(name, composed.config.model.path, composed.preset, reward, f"{sentence}.")
