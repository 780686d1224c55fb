"""The folder of a pipeline as diffusers reads it: with `model.parts`, and with variants where there is nothing else."""

import atexit
import difflib
import functools
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from gerl.config.bounded_text import read_json
from gerl.errors import ModelError
from gerl.model.paths import INDEX

logger = logging.getLogger(__name__)
Part = TypeVar("Part", str, Path)
Parts = Mapping[str, str | None]  # component -> folder or Hub id of the one that replaces it, None: left out
NO_PARTS: Parts = MappingProxyType({})
NONE = [None, None]  # a component of model_index.json that is left out
# diffusers' names of weights in a variant: model.fp16.safetensors, model.fp16-00001-of-00002.safetensors, and indices
VARIANT = re.compile(r"(?P<stem>\w+)\.(?P<variant>\w+)(?P<shard>-\d+-of-\d+)?\.(?P<end>safetensors|bin)")
VARIANT_INDEX = re.compile(r"(?P<stem>\w+)\.(?P<end>safetensors|bin)\.index\.(?P<variant>\w+)\.json")
WEIGHTS = (".safetensors", ".bin", ".index.json")
PREFERRED = ("fp16", "bf16")
TEXT, TOKENS = "text_encoder", "tokenizer"


def left_out(index: Mapping[str, object]) -> dict[str, None]:
    """Return the components without value in model_index.json, which `from_pretrained` must be told of."""
    return dict.fromkeys(name for name, entry in index.items() if entry == NONE)


def with_tokenizers(parts: Mapping[str, Part | None]) -> dict[str, Part | None]:
    """Return `parts` with the tokenizers of text encoders that are left out, which are left out too unless named."""
    encoders = [name for name, value in parts.items() if value is None and name.startswith(TEXT)]
    return {**{name.replace(TEXT, TOKENS): None for name in encoders}, **parts}


def check_names(parts: Iterable[str], index: Mapping[str, object]) -> None:
    """Raise `ModelError` for a part that is not a component in model_index.json."""
    components = [name for name, entry in index.items() if isinstance(entry, list) and not name.startswith("_")]
    for name in (name for name in parts if name not in components):
        near = difflib.get_close_matches(name, components, n=1)
        meant = f"did you mean model.parts.{near[0]}?" if near else f"use one of {', '.join(components)}"
        raise ModelError(f"model.parts.{name}: the pipeline has no component {name!r}; {meant}")


def arranged(folder: Path, parts: Mapping[str, Path | None]) -> Path:
    """Return `folder`, or one of links to its files with `parts` in place and variants under their plain names.

    parts: the folder of a component that replaces one, None: left out. The folder of links lives as long as this
    process. Raises `ModelError` for a part without a class.
    """
    index = read_json(folder / INDEX)
    replaced = {name: part for name, part in with_tokenizers(parts).items() if name in index}
    components = [name for name, entry in index.items() if isinstance(entry, list) and (folder / name).is_dir()]
    sources = {name: folder / name for name in components} | replaced
    variants = variants_in(f"{n}/{f.name}" for n, path in sources.items() if path is not None for f in path.iterdir())
    if not parts and not variants:
        return folder
    absent = tuple(name for name, path in sources.items() if path is None)
    return _linked(folder, tuple((n, p) for n, p in sources.items() if p is not None), absent, tuple(variants.items()))


def variants_in(files: Iterable[str]) -> dict[str, str]:
    """Return the components, by their `files` NAME/FILE, whose weights are there in a variant only, and which one."""
    variants: dict[str, set[str]] = {}
    plain: set[str] = set()
    for component, name in (file.split("/") for file in files if file.count("/") == 1):
        if match := VARIANT.fullmatch(name) or VARIANT_INDEX.fullmatch(name):
            variants.setdefault(component, set()).add(match["variant"])
        elif name.endswith(WEIGHTS):
            plain.add(component)
    without_plain = {component: names for component, names in variants.items() if component not in plain}
    return {c: next((name for name in PREFERRED if name in names), min(names)) for c, names in without_plain.items()}


@functools.cache
def _linked(
    folder: Path,
    sources: tuple[tuple[str, Path], ...],
    absent: tuple[str, ...],
    variants: tuple[tuple[str, str], ...],
) -> Path:
    for variant in sorted({variant for _, variant in variants}):
        of = ", ".join(name for name, other in variants if other == variant)
        logger.info("%s: the weights of %s are read from their variant %s, there are no others", folder, of, variant)
    made = Path(tempfile.mkdtemp(prefix="gerl_pipeline_"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    index = read_json(folder / INDEX)
    for file in folder.iterdir():
        if file.name not in (INDEX, *absent, *dict(sources)):
            (made / file.name).symlink_to(file.absolute())
    for name, path in sources:
        _link(path, made / name, dict(variants).get(name))
        if path != folder / name:
            index[name] = _entry(name, path, index[name])
    index |= dict.fromkeys(absent, NONE)
    (made / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return made


def _link(source: Path, target: Path, variant: str | None) -> None:
    target.mkdir()
    for file in source.iterdir():
        name = file.name
        if variant is not None and (match := VARIANT.fullmatch(name)) and match["variant"] == variant:
            name = f"{match['stem']}{match['shard'] or ''}.{match['end']}"
        elif variant is not None and (match := VARIANT_INDEX.fullmatch(name)) and match["variant"] == variant:
            plain = file.read_text(encoding="utf-8").replace(f".{variant}-", "-")
            (target / f"{match['stem']}.{match['end']}.index.json").write_text(plain, encoding="utf-8")
        (target / name).symlink_to(file.absolute())


def _entry(name: str, folder: Path, before: list[str | None]) -> list[str | None]:
    """Return library and class of a component for model_index.json: as its files say, else as `before`."""
    if before == NONE and folder.name == name and (pipeline := folder.parent / INDEX).is_file():
        return list(read_json(pipeline).get(name, NONE))
    for file in ("config.json", "scheduler_config.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            settings = read_json(folder / file)
            if "_class_name" in settings:
                return ["diffusers", settings["_class_name"]]
            if before == NONE and (
                kind := settings.get("tokenizer_class") or (settings.get("architectures") or [0])[0]
            ):
                return ["transformers", kind]
    if before == NONE:
        raise ModelError(f"model.parts.{name}={str(folder)!r}: it does not name its class; give a pipeline with {name}")
    return before
