"""What every scorer is."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

from PIL import Image

from gerl.errors import RewardError
from gerl.protocol import Prompt


class Scorer(Protocol):
    """Gives images a score: higher is better, in the scorer's own unit.

    Three attributes are optional. `groupwise = True`: a call gets all images of one group, to be compared with each
    other. `takes_frames = True`: a video arrives as a list of frames; others are shown single frames, and the mean of
    their scores counts. `shares`: scorers with the same value run in the same processes, as they use the same model.
    """

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        """Scores [B], a list of floats, for images [B] drawn for prompts [B] with metadata [B].

        Or several such lists by name, of which the first is the score and the others are watched. The type is `Any`
        because a user's own function may return anything; the reward manager checks it.
        """

    def check_prompts(self, prompts: list[Prompt]) -> None:
        """Raise `DataError` naming the first prompt whose images could not be scored."""


def columns_of(returned: Any, name: str) -> dict[str, list[Any]]:
    """What the scorer `name` returned, as lists by column; one list alone is the column `name`.

    Raises `TypeError` for what is neither a list nor a dict of lists.
    """
    columns = dict(returned) if isinstance(returned, Mapping) else {name: returned}
    wrong = [type(values).__name__ for values in columns.values() if isinstance(values, str | bytes | Mapping)]
    if wrong or not columns:
        what = f"a {wrong[0]}" if wrong else "an empty dict"
        raise TypeError(f"returned {what}, expected a list of floats, or a dict of them by name")
    return {str(column): list(values) for column, values in columns.items()}


def require(module: str, extra: str) -> ModuleType:
    """Import the package of a scorer; raises `RewardError` naming the pip extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RewardError(
            f"this scorer needs the package {module}, which cannot be imported ({error}): "
            f"run pip install 'gerl[{extra}]'"
        ) from error
