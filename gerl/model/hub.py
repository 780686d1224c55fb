"""Pipelines and LoRAs from the Hugging Face Hub: downloads into its cache, and readable errors."""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from huggingface_hub import constants, model_info, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled

from gerl.config.bounded_text import read_json
from gerl.errors import GerlError, ModelError
from gerl.model.parts import NO_PARTS, Parts, arranged, check_names, variants_in, with_tokenizers
from gerl.model.paths import INDEX, resolve
from gerl.progress import waiting
from gerl.utils.hub_errors import PATIENCE, in_words, missing, request_error
from gerl.utils.versions import has

logger = logging.getLogger(__name__)
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
FILES = (".safetensors", ".json", ".txt", ".model")  # files of a component; .bin where there are no others


class Downloads:
    """Growth of the Hub's cache on this machine since creation, as text; "" if it has not grown."""

    def __init__(self) -> None:
        self._before = cache_bytes()

    def __call__(self) -> str:
        grown = cache_bytes() - self._before
        return f"{grown / 1e9:.2f} GB downloaded" if grown >= 1e7 else ""


def cache_bytes() -> int:
    """Return the size in bytes of the files in the Hub's cache, including incomplete ones."""
    total = 0
    for name in (os.path.join(folder, file) for folder, _, files in os.walk(constants.HF_HUB_CACHE) for file in files):
        with contextlib.suppress(OSError):  # renamed in the meantime
            stat = os.lstat(name)
            total += min(stat.st_size, 512 * stat.st_blocks) if hasattr(stat, "st_blocks") else stat.st_size
    return total


def model_folder(path: str, parts: Parts = NO_PARTS) -> Path:
    """Return the folder of the pipeline `path` with `parts`, fetched if it is on the Hub. Raises `ModelError`."""
    source = resolve(path)
    folder = Path(source if Path(source).is_dir() else fetch(source, parts))
    if parts:
        check_names(parts, read_json(folder / INDEX))
    return arranged(folder, {name: None if part is None else part_folder(name, part) for name, part in parts.items()})


def part_folder(name: str, source: str) -> Path:
    """Return the folder of the component `name` in `source`, folder or Hub id of it or of a pipeline that has it."""
    setting, folder = f"model.parts.{name}={source!r}", Path(source).expanduser()
    if not folder.exists():
        if not HUB_ID.fullmatch(source):
            raise ModelError(f"{setting}: there is no folder {folder.absolute()}; correct the path, or give a Hub id")
        unreached = request_error(source)
        with _readable(source, unreached, f"model.parts.{name}"), waiting(f"fetching {source}", Downloads()):
            infos = [] if unreached else model_info(source, timeout=PATIENCE).siblings or []
            files = [entry.rfilename for entry in infos]
            old = not any(file.endswith(".safetensors") for file in files)
            component = [f for f in files if "/" not in f and f.endswith((*FILES, ".bin") if old else FILES)]
            wanted = [INDEX, f"{name}/*"] if INDEX in files else component
            folder = Path(snapshot_download(source, allow_patterns=wanted, local_files_only=unreached is not None))
    part = folder / name if (folder / INDEX).is_file() else folder
    if not part.is_dir():
        raise ModelError(
            f"{setting} is not a folder with a {name}: give one that pipe.{name}.save_pretrained has written"
        )
    return part.absolute()


def fetch(path: str, parts: Parts = NO_PARTS) -> str:
    """Download missing files of the pipeline with Hub id `path`, and return its folder in the Hub's cache.

    Components in `parts` are not downloaded; a variant is if there are no other weights.
    Without access to the Hub, or with HF_HUB_OFFLINE, the cache must hold the complete pipeline. Raises `ModelError`.
    """
    from diffusers import DiffusionPipeline  # imported lazily: the driver of a run does not need diffusers

    unreached, without = request_error(path), dict.fromkeys(with_tokenizers(parts))
    with _readable(path, unreached, "model.path"), code_refused():
        if unreached is None:
            if parts:
                check_names(parts, DiffusionPipeline.load_config(path))
            files = [entry.rfilename for entry in model_info(path, timeout=PATIENCE).siblings or []]
            variants = variants_in(file for file in files if file.partition("/")[0] not in parts)
            with waiting(f"fetching {path} from {constants.ENDPOINT}", Downloads()):
                for variant in sorted(set(variants.values())):
                    DiffusionPipeline.download(path, variant=variant, **without)
                return str(DiffusionPipeline.download(path, **without))
        folder = DiffusionPipeline.download(path, local_files_only=True, **without)
        if not isinstance(unreached, OfflineModeIsEnabled):
            logger.info("%s is loaded from the cache: the Hub cannot be reached (%s)", path, in_words(unreached))
    return str(folder)


def fetch_lora(source: str) -> Path:
    """Return file or folder of the LoRA `owner/name[/path inside]`, downloaded into the cache. Raises `ModelError`."""
    owner, name, *inside = source.split("/")
    repository, file = f"{owner}/{name}", "/".join(inside)
    wanted = [file, f"{file}/*"] if file else ["*.safetensors", "*adapter_config.json"]
    unreached = request_error(repository)
    with _readable(repository, unreached, "model.lora"):
        if unreached is None:
            files = {entry.rfilename for entry in model_info(repository, timeout=PATIENCE).siblings or []}
            if not file and INDEX in files:
                raise ModelError(f"model.lora={source!r} is a pipeline, not a LoRA: use it as model.path")
        with waiting(f"fetching {source} from {constants.ENDPOINT}", Downloads()):
            folder = snapshot_download(repository, allow_patterns=wanted, local_files_only=unreached is not None)
    return Path(folder) / file


@contextlib.contextmanager
def _readable(path: str, unreached: Exception | None, key: str) -> Iterator[None]:
    """Convert errors of a download into `ModelError`; `unreached`: the error of a first request to the Hub, if any."""
    try:
        yield
    except GerlError:
        raise
    except Exception as error:  # errors of the network, the disk, the Hub and diffusers have no common base class
        code = "trust_remote_code" in str(error)
        raise ModelError(refusal_of_code(path) if code else missing(path, error, unreached, key)) from error


_refusing: ContextVar[bool] = ContextVar("_refusing", default=False)


@contextlib.contextmanager
def code_refused() -> Iterator[None]:
    """Refuse code of a model within the block; diffusers before 0.38 ignores `trust_remote_code` and would run it."""
    _guard_diffusers()
    token = _refusing.set(True)
    try:
        yield
    finally:
        _refusing.reset(token)


@functools.cache
def _guard_diffusers() -> None:
    if has("diffusers", "0.38"):
        return
    from diffusers.pipelines import pipeline_loading_utils

    load = pipeline_loading_utils.get_class_from_dynamic_module

    def get_class(*args: Any, **kwargs: Any) -> Any:
        if _refusing.get():
            raise ValueError("the model contains custom code, which needs trust_remote_code")
        return load(*args, **kwargs)

    pipeline_loading_utils.get_class_from_dynamic_module = get_class


def refusal_of_code(path: str) -> str:
    """Return the error message for a Hub pipeline that would run custom code."""
    return (
        f"model.path={path!r} contains custom code, and gerl runs none from the Hub: download it with 'hf download "
        f"{path} --local-dir FOLDER', read the code, and set model.path=FOLDER"
    )
