"""Base class and shared types of all scorers, package imports, and reference images."""

import base64
import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from PIL import Image
from pydantic import ConfigDict

from gerl.errors import DataError, RewardError
from gerl.protocol import FeedbackRequest, Prompt
from gerl.utils.condition_images import read_picture
from gerl.utils.files import is_within

if TYPE_CHECKING:
    import torch


# --- Base class and shared types of all scorers, and package imports

VERSION = "1"  # of the HTTP protocol of reward services
Metadata = dict[str, Any]  # the other columns of a prompt's row
Columns = dict[str, list[float]]  # column name -> [B]
JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"


class Scorer(ABC):
    """Scorer of images; higher is better, in arbitrary units.

    Built-in scorers are dataclasses whose fields are the kwargs. `groupwise`: a call gets all images of one group, for
    comparison. `takes_frames`: a video is passed as a list of frames; other scorers get single frames, and their scores
    are averaged. `differentiable`: `tensor_scores` returns differentiable scores. `on_worker`: computed by the worker
    that sampled the image, from its latents (`Images.scores`).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    groupwise: bool = False
    takes_frames: bool = False
    differentiable: bool = False
    on_worker: bool = False

    @property
    def shares(self) -> str | None:
        """Key of the model in use: scorers with equal keys run in the same processes; None: not shared."""
        return None

    @abstractmethod
    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> object:
        """Return scores `[B]`, a list of floats, for images `[B]` of prompts `[B]` with metadata `[B]`.

        May return several such lists by name; the first is the score, the others are only logged. The type is `object`
        because a custom function may return anything; `columns_of` and the reward worker check it.
        """

    def tensor_scores(self, images: "torch.Tensor", prompts: list[str], metadata: list[Metadata]) -> "torch.Tensor":
        """Return differentiable scores `[B]` of images `[B, 3, H, W]` in [0, 1] (or videos, if `takes_frames`)."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def place(self, error: BaseException | None = None) -> str:
        """Return ` (FILE, line N: code)` of the user code that raised `error`, or of the function; else ""."""
        return ""

    def check_prompts(self, prompts: list[Prompt]) -> None:
        """Raise `DataError` naming the first prompt whose images could not be scored."""
        for prompt in prompts:
            try:
                self.check_prompt(prompt.text, prompt.metadata)
            except DataError as error:
                raise DataError(f"prompt {prompt.id}: {error}") from None

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:  # noqa: B027  most scorers take any prompt
        """Raise `DataError` if images of this row could not be scored; does nothing unless overridden."""


class PeopleScorer(Scorer):
    """Base class of human feedback on training groups; the request is repeated until people have answered."""

    groupwise = True
    takes_frames = True

    @abstractmethod
    def ask(
        self, images: Callable[[], Sequence[Any]], prompt: str, metadata: Metadata, occasion: FeedbackRequest
    ) -> list[float] | str:
        """Return the scores `[B]` of a group, or without waiting "" or the problem. May raise `RewardError`."""

    @abstractmethod
    def reach(self) -> str:
        """Return "" if people can be asked, else the problem with the service; raises `RewardError` like `ask`."""

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> object:
        raise NotImplementedError("people are asked about groups: call ask")


class RemoteOnlyScorer(Scorer):
    """Placeholder for a scorer of built-in class `kind` (or custom) that can be built only in its own environment."""

    def __init__(self, kind: type[Scorer] = Scorer) -> None:
        self.groupwise, self.takes_frames = kind.groupwise, kind.takes_frames

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> object:
        raise NotImplementedError("this scorer runs only in its own environment")


class ReturnError(TypeError):
    """Error for a scorer's return value that is neither a list of numbers nor a dict of such lists."""


def require(module: str, extra: str) -> ModuleType:
    """Import the package of a scorer; raises `RewardError` naming the pip extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RewardError(
            f"this scorer needs the package {module}, which cannot be imported ({error}): "
            f"run pip install 'gerl[{extra}]'"
        ) from error


# --- Reference images in a prompt's row, such as the source of an edit

Reference: TypeAlias = Path | Image.Image


def reference_of(scorer: str, prompt: str, metadata: Metadata, column: str) -> Reference:
    """Return the only image in the row's `column`, a path or PIL image; raises `DataError` for none or several."""
    references = references_of(scorer, prompt, metadata, column)
    if len(references) > 1:
        raise DataError(
            f"{prompt!r} has {len(references)} images in {column!r}, but {scorer} compares with one: use a column with "
            "a single image for the scorer"
        )
    return references[0]


def references_of(scorer: str, prompt: str, metadata: Metadata, column: str) -> list[Reference]:
    """Return the images in the row's `column`, one or a list of them; raises `DataError` if there are none."""
    value = metadata.get(column)
    parts: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, Image.Image | Path) or (isinstance(part, str) and part) for part in parts):
        raise DataError(
            f"{prompt!r} has no reference for the {scorer} scorer, expected the path of an image in the row's "
            f"{column!r}, got {value!r:.200}: add it, or use another column for the scorer"
        )
    return [part if isinstance(part, Image.Image) else _file(prompt, part) for part in parts]


_folders: ContextVar[str | None] = ContextVar("gerl_reference_folders", default=None)  # None: any


@contextlib.contextmanager
def references_within(folders: str) -> Iterator[None]:
    """Within the block, accept only references to files in `folders`, separated by commas: others name the files."""
    before = _folders.set(folders)
    try:
        yield
    finally:
        _folders.reset(before)


def _file(prompt: str, path: str | Path) -> Path:
    file = Path(path).expanduser()
    if (folders := _folders.get()) is not None and not is_within(file, folders):
        raise DataError(
            f"{prompt!r} has the reference {str(path)!r:.200}, which is in no folder whose files requests may name: "
            "start the service with folders=FOLDER"
        )
    if not file.is_file():
        raise DataError(
            f"{prompt!r} has the reference {str(path)!r}, but there is no file {file.absolute()}: correct the path"
        )
    return file


def read(reference: Reference) -> Image.Image:
    """Load a reference as an upright RGB image; raises `DataError` if the file is not an image."""
    return reference if isinstance(reference, Image.Image) else read_picture(reference)


def features_of(
    references: Sequence[Reference], features: Callable[[list[Image.Image]], "torch.Tensor"]
) -> "torch.Tensor":
    """Return `features` `[B, dim]` of references `[B]`; each is encoded once, because a group shares its reference."""
    keys = [str(reference) if isinstance(reference, Path) else id(reference) for reference in references]
    unique = dict(zip(keys, references, strict=True))
    rows = {key: row for row, key in enumerate(unique)}
    return features([read(reference) for reference in unique.values()])[[rows[key] for key in keys]]


def decode_base64(texts: Sequence[str], kind: str = "image") -> list[bytes]:
    """Decode the files of a request; raises `RewardError` if one is not base64."""
    files = []
    for i, text in enumerate(texts):
        try:
            files.append(base64.b64decode(text, validate=True))
        except ValueError:
            raise RewardError(f"{kind} {i} of {len(texts)} is not base64: encode the bytes of its file") from None
    return files
