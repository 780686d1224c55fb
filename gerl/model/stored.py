"""Models whose weights are still in their files: a rank reads a block's when it is about to divide them.

Such a model is what its class's `from_pretrained` would return, down to its buffers, but each weight is a single zero
that stands for all of its values. Which file has a weight follows the renamings of diffusers and transformers; where
it does not come from one tensor of a file, the model is read whole, by its class.
"""

import contextlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, ModelMixin
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)

from gerl.model.quantisation import leading_values
from gerl.model.skeletons import default_dtype

logger = logging.getLogger(__name__)
NAMES = {ModelMixin: "diffusion_pytorch_model.safetensors", PreTrainedModel: "model.safetensors"}
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Stored:
    """A weight in a safetensors file, and the precision in which the model has it."""

    file: Path
    key: str
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """The weight, on the CPU; in the file's own precision its memory is the file's, mapped."""
        with safe_open(self.file, framework="pt") as opened:
            return self._cast(opened.get_tensor(self.key))

    def leading(self, count: int) -> torch.Tensor:
        """As `leading_values` of the whole weight, of which no more is read than these."""
        with safe_open(self.file, framework="pt") as opened:
            part = opened.get_slice(self.key)
            shape = part.get_shape()
            if not shape:
                return leading_values(self._cast(opened.get_tensor(self.key)), count)
            rows = math.ceil(count / max(1, math.prod(shape[1:])))
            return leading_values(self._cast(part[: min(rows, shape[0])]), count)

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype) if values.is_floating_point() else values


Unread = dict[torch.nn.Parameter, Stored]  # weights that are still in their files


class _Whole(Exception):
    """Why a model is read whole."""


def fill(module: torch.nn.Module, unread: Unread) -> None:
    """Read those weights of `module` that are still in their files, and take them out of `unread`."""
    for parameter in module.parameters():
        if (stored := unread.pop(parameter, None)) is not None:
            parameter.data = stored.read().to(parameter.dtype)


def unread_models(folder: Path, names: list[str], dtype: torch.dtype) -> tuple[dict[str, torch.nn.Module], Unread]:
    """Those components `names` of the pipeline in `folder` whose weights can stay in their files, and these weights.

    The others have to be read whole, for which a log line gives the reason.
    """
    index = DiffusionPipeline.load_config(folder)
    models: dict[str, torch.nn.Module] = {}
    unread: Unread = {}
    for name in names:
        try:
            models[name], found = _model(_class(index[name]), folder / name, dtype)
        except _Whole as reason:
            logger.info("every rank reads all of %s before keeping its shard: %s", name, reason)
        else:
            unread |= found
    return models, unread


def _class(entry: list[str]) -> type[Any]:
    library, name = entry
    for module, base in ((diffusers, ModelMixin), (transformers, PreTrainedModel)):
        kind = getattr(module, name, None) if library == module.__name__ else None
        if isinstance(kind, type) and issubclass(kind, base):
            return kind
    raise _Whole(f"its class {library}.{name} is not from diffusers or transformers")


def _model(kind: type[Any], folder: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, Unread]:
    """A component without its weights, and where they are; raises `_Whole`."""
    build, base = (_of_diffusers, ModelMixin) if issubclass(kind, ModelMixin) else (_of_transformers, PreTrainedModel)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config") is not None:
        raise _Whole("its weights are quantised in their files")
    files = _files(folder, NAMES[base])
    model, dtypes, keys = build(kind, folder, dtype, list(files))
    shapes = _shapes(files)
    wanted = model.state_dict(keep_vars=True)
    aliases: dict[int, list[str]] = defaultdict(list)
    for name, tensor in wanted.items():
        aliases[id(tensor)].append(name)
    unread: Unread = {}
    with torch.no_grad():
        for names in aliases.values():
            tensor, present = wanted[names[0]], [name for name in names if name in keys]
            if len(present) != 1:
                raise _Whole(f"its files contain {names[0]} {len(present)} times")
            key = keys[present[0]]
            if shapes[key] != tuple(tensor.shape):
                raise _Whole(f"{key} has another shape in its file than {names[0]} in the model")
            stored = Stored(files[key], key, dtypes[present[0]])
            if isinstance(tensor, torch.nn.Parameter):
                unread[tensor] = stored
            else:
                tensor.data = stored.read()
    return model, _with_placeholders(model, unread)


def _with_placeholders(model: torch.nn.Module, unread: Unread) -> Unread:
    """Give `model` a parameter on the CPU for each on the meta device, without memory, and return where its values are.

    On the meta device nothing could be added to a layer: peft would put its matrices there as well.
    """
    found: Unread = {}
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                stored = unread[parameter]
                values = torch.zeros((), dtype=stored.dtype).expand(parameter.shape)
                made[parameter] = torch.nn.Parameter(values, requires_grad=False)
                found[made[parameter]] = stored
            module._parameters[name] = made[parameter]
    return found


def _files(folder: Path, name: str) -> dict[str, Path]:
    """The file of each key, of one safetensors file or several with an index; raises `_Whole`."""
    index = folder / f"{name}.index.json"
    if index.is_file():
        return {key: folder / file for key, file in json.loads(index.read_text())["weight_map"].items()}
    if not (folder / name).is_file():
        raise _Whole(f"it has no {name}")
    with safe_open(folder / name, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), folder / name)


def _shapes(files: Mapping[str, Path]) -> Shapes:
    found: Shapes = {}
    for file in set(files.values()):
        with safe_open(file, framework="pt") as opened:
            keys = opened.keys()  # it is no mapping
            found |= {key: tuple(opened.get_slice(key).get_shape()) for key in keys}
    return found


Built = tuple[torch.nn.Module, dict[str, torch.dtype], dict[str, str]]  # with dtype and the file's key by name


def _of_diffusers(kind: type[ModelMixin], folder: Path, dtype: torch.dtype, keys: list[str]) -> Built:
    """As `ModelMixin.from_pretrained` builds it before it reads its weights."""
    with accelerate.init_empty_weights(), default_dtype(dtype):
        model = kind.from_config(kind.load_config(folder))
    model.register_to_config(_name_or_path=str(folder))
    kept = type(model)._keep_in_fp32_modules or []
    kept = kept if isinstance(kept, list) else [kept]
    names = {key: key for key in keys}
    if not (folder / f"{NAMES[ModelMixin]}.index.json").is_file():
        model._fix_state_dict_keys_on_load(names)
    state = model.state_dict()
    dtypes = {name: torch.float32 if not set(kept).isdisjoint(name.split(".")) else dtype for name in state}
    return model, dtypes, names


def _of_transformers(kind: type[PreTrainedModel], folder: Path, dtype: torch.dtype, keys: list[str]) -> Built:
    """As `PreTrainedModel.from_pretrained` builds it before it reads its weights."""
    with accelerate.init_empty_weights():
        model = kind._from_config(kind.config_class.from_pretrained(folder), dtype=dtype)
    model.tie_weights()  # which gets lost in that context
    model.config.name_or_path = str(folder)
    if model.can_generate():
        with contextlib.suppress(OSError):  # it has none of its own
            model.generation_config = GenerationConfig.from_pretrained(folder)
    state = model.state_dict()
    dtypes = {name: tensor.dtype for name, tensor in state.items()} | _dtypes_of_plan(model, dtype, list(state))
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    names: dict[str, str] = {}
    for key in keys:
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, converter = rename_source_key(key, [], [], model.base_model_prefix, state)
        if converter is not None:
            raise _Whole(f"{name} is combined from several tensors of its files")
        if name in state and name in names:
            raise _Whole(f"its files contain {name} twice")
        names[name] = key
    return model, dtypes, names


def _dtypes_of_plan(model: PreTrainedModel, dtype: torch.dtype, names: list[str]) -> dict[str, torch.dtype]:
    """The weights that a model of `dtype` keeps in another precision, such as a layer of T5 in fp16."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, groups, _ = build_glob_alternation(list(plan))
    matches = {name: pattern.search(name) for name in names}
    return {name: plan[groups[match.lastgroup]] for name, match in matches.items() if match}
