"""A pipeline in memory as files, which the configuration of a run names."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)


def path_of(pipe: DiffusionPipeline, saved: Path) -> str:
    """The folder or hub id that `pipe` was read from, or `saved`, where it is written if it is no longer the same.

    A component that was changed in memory (a fused LoRA, another VAE or scheduler) would otherwise be replaced by its
    files in everything that follows a run. Components that are unchanged are not copied: `saved` has links to them.
    Adapters that are not fused, such as the LoRA that was just trained, are no part of the base model. Raises
    `ModelError` for what is no pipeline, or cannot be written.
    """
    from diffusers import DiffusionPipeline  # in here: with a path nothing of diffusers is needed

    from gerl.model.denoisers import check_offered

    if not isinstance(pipe, DiffusionPipeline):
        check_offered(pipe)
    if saved.exists():
        return str(saved)
    known = getattr(pipe, "name_or_path", None) or ""
    source = _folder(known)
    if source is None:
        check_offered(pipe)
        pipe.save_pretrained(str(saved))
        return str(saved)
    logger.info("comparing the pipeline in memory with its files, %s ...", known)
    index = DiffusionPipeline.load_config(str(source))
    changed = [
        name
        for name, part in pipe.components.items()
        if index.get(name, [None, None])[1] != (None if part is None else type(part).__name__)
        or not _is_as_stored(name, part, source)
    ]
    if not changed:
        return str(known)
    check_offered(pipe)
    logger.info(
        "%s in memory %s different from %s: the pipeline is written to %s, which becomes the run's model.path",
        " and ".join(changed),
        "is" if len(changed) == 1 else "are",
        known,
        saved,
    )
    pipe.save_config(str(saved))
    for name, part in pipe.components.items():
        if part is not None and name in changed:
            part.save_pretrained(str(saved / name))
        elif part is not None and (source / name).exists():
            (saved / name).symlink_to((source / name).resolve(), target_is_directory=True)
    return str(saved)


def _folder(known: str) -> Path | None:
    """The folder with the files of the pipeline `known`, a folder or an id of the hub; None where there is none."""
    from huggingface_hub import try_to_load_from_cache

    from gerl.model.paths import INDEX

    if known and (Path(known) / INDEX).is_file():
        return Path(known)
    found = try_to_load_from_cache(known, INDEX) if known.count("/") == 1 else None
    return Path(found).parent if isinstance(found, str) else None


def _is_as_stored(name: str, part: Any, source: Path) -> bool:
    """Whether the component `part` is what its class reads from the pipeline's folder."""
    import torch

    if not hasattr(part, "save_pretrained"):
        return True  # None, or a plain value of model_index.json
    if getattr(part, "quantization_method", None) or getattr(part, "hf_quantizer", None):
        logger.info("%s is quantised in memory: export and evaluation use its weights as they are in %s", name, source)
        return True
    kind, module = type(part), isinstance(part, torch.nn.Module)
    try:
        read = kind.from_pretrained(str(source), subfolder=name, **({"dtype": part.dtype} if module else {}))
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError):
        return False  # its files are of another class, or there are none
    if not module:
        return _written(part) == _written(read)
    ours, theirs = _base_weights(part), read.state_dict()
    return (
        _settings(part) == _settings(read)
        and ours.keys() == theirs.keys()
        and all(
            value.shape == theirs[key].shape and torch.equal(value.cpu(), theirs[key].to(value.dtype))
            for key, value in ours.items()
        )
    )


def _base_weights(model: Any) -> dict[str, Any]:
    """The weights of a model by name, as they are called without the adapters on it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    found = {}
    for key, value in model.state_dict().items():
        above = next((key[:i] for i, c in enumerate(key) if c == "." and key[:i] in adapted), None)
        if above is None or key.startswith(f"{above}.base_layer."):
            found[key.replace(".base_layer.", ".")] = value
    return found


def _settings(part: Any) -> dict[str, Any]:
    """The configuration of a model of diffusers; that of one of transformers shows in its weights."""
    config = getattr(part, "config", None)
    return {k: v for k, v in config.items() if not k.startswith("_")} if isinstance(config, dict) else {}


def _written(part: Any) -> dict[str, Any]:
    """The files of a tokenizer, scheduler or processor, less how the last call of a tokenizer padded and cut."""
    with tempfile.TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        found: dict[str, Any] = {p.name: p.read_text("utf-8", "replace") for p in Path(folder).iterdir() if p.is_file()}
    if "tokenizer.json" in found:
        found["tokenizer.json"] = json.loads(found["tokenizer.json"]) | {"truncation": None, "padding": None}
    return found
