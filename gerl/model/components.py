"""Components of a pipeline's folder: whether their files are there and whole, before anything runs."""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from gerl.config.bounded_text import read_json, regular
from gerl.errors import ModelError
from gerl.model.denoisers import component_class
from gerl.utils.files import reason

# names of weight files, in the order in which the libraries look for them
NAMES = {
    ModelMixin: ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    PreTrainedModel: ("model.safetensors", "pytorch_model.bin"),
}
# in errors of transformers and diffusers about weights of another shape
OTHER_SHAPE = re.compile("ignore_mismatched_sizes|expected shape")
POINTER = b"version https://git-lfs"
LIBRARIES = ("diffusers", "transformers")
_patching = threading.RLock()


class IncompleteFiles(ModelError, ValueError):
    """Files of a component are missing, cut off or of another model."""


def check_files(folder: Path) -> None:
    """Raise `IncompleteFiles` for a component of the pipeline in `folder` whose files are missing or cut off."""
    for name, entry in DiffusionPipeline.load_config(str(folder)).items():
        if not isinstance(entry, list) or entry[0] not in LIBRARIES or (part := folder / name).is_file():
            continue
        if not part.is_dir() or not any(part.iterdir()):
            raise IncompleteFiles(f"it has no folder {name} with the files of its {entry[1]}: download all its folders")
        if (kind := component_class(entry)) is not None:
            if not (part / "config.json").is_file():
                raise IncompleteFiles(f"{name} has no config.json: download all files of the folder {name}")
            for file in _weight_files(
                name, part, NAMES[ModelMixin if issubclass(kind, ModelMixin) else PreTrainedModel]
            ):
                _check_whole(name, file)


def _weight_files(component: str, folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files with the weights of a component, of which those that an index lists must all be there."""
    for name in names:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            listed = sorted(set(read_json(index)["weight_map"].values()))
            if absent := [file for file in listed if not (folder / file).is_file()]:
                raise IncompleteFiles(
                    f"{component} lacks {len(absent)} of the {len(listed)} files in {index.name}, such as {absent[0]}: "
                    "download them"
                )
            return [folder / file for file in listed]
    raise IncompleteFiles(f"{component} has no weights: download its {names[0]}")


def _check_whole(name: str, file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            raise IncompleteFiles(f"{name}/{file.name} is a pointer of Git LFS, not the weights: run 'git lfs pull'")
    if file.suffix == ".safetensors":
        try:
            with safe_open(regular(file), "pt"):
                pass
        except SafetensorError as error:
            raise IncompleteFiles(
                f"{name}/{file.name} is cut off or damaged ({reason(error)}): download it again"
            ) from None


@contextlib.contextmanager
def weights_checked() -> Iterator[None]:
    """Within the block, models of diffusers and transformers raise `IncompleteFiles` if their files lack weights.

    The libraries only warn: weights stay random (transformers), or without values (diffusers).
    """
    with _patching, contextlib.ExitStack() as undo:
        for base in (ModelMixin, PreTrainedModel):
            original = base.__dict__["from_pretrained"]
            base.from_pretrained = classmethod(_checked(getattr(original, "__func__", original)))
            undo.callback(setattr, base, "from_pretrained", original)
        yield


def _checked(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def from_pretrained(kind: type[Any], path: Any, *args: Any, **options: Any) -> Any:
        name = str(options.get("subfolder") or Path(path).name)
        try:
            model, info = read(kind, path, *args, **{**options, "output_loading_info": True})
        except (RuntimeError, ValueError) as error:
            if not OTHER_SHAPE.search(str(error)):
                raise
            raise IncompleteFiles(
                f"{name} ({kind.__name__}) has weights of another shape than its config.json says: download the folder "
                f"{name} again, complete and of the same model"
            ) from error
        check_loaded(name, model, info)
        return (model, info) if options.get("output_loading_info") else model

    return from_pretrained


def check_loaded(name: str, model: Any, info: Mapping[str, Any]) -> None:
    """Raise `IncompleteFiles` if the files of `model`, the component `name`, lack some of its parameters.

    info: of `output_loading_info`, which does not count tied weights. Buffers are computed where they are absent.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if absent := sorted(parameters.keys() & set(info["missing_keys"])):
        raise IncompleteFiles(
            f"{name} ({type(model).__name__}) needs {len(parameters)} weights, and its files have none for "
            f"{len(absent)} of them ({_some(absent)}): download the folder {name} again, complete and of the same model"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
