"""Models split over the ranks of a worker: frozen weights, lazily loaded weights, and the sequence of a call."""

import contextlib
import inspect
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import accelerate
import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention, MochiAttention
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from transformers import GenerationConfig, PreTrainedModel

from gerl.config.bounded_text import read_json, regular
from gerl.engine.hooks import put
from gerl.errors import ModelError
from gerl.model.denoisers import component_class, default_dtype
from gerl.model.quantization import leading_values
from gerl.utils.versions import has, require

# --- Lazy loading: a rank reads a block's weights from their files just before it shards them.
#
# A lazy model equals the one its class's `from_pretrained` would return, with all buffers, but each weight is an
# expanded zero. Weights are matched to file tensors by the renamings of diffusers and transformers; if a weight does
# not come from a single tensor of a file, the model is loaded completely by its class.

logger = logging.getLogger(__name__)
TRANSFORMERS = "5.12"  # the oldest tried whose weights by part are those of `from_pretrained`: with 5.8 they are not
NAMES = {ModelMixin: "diffusion_pytorch_model.safetensors", PreTrainedModel: "model.safetensors"}


@dataclass(frozen=True)
class Stored:
    """Weight in a safetensors file, and its dtype in the model."""

    file: Path
    key: str
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return the weight on the CPU; if the dtype equals the file's, it is memory-mapped."""
        with safe_open(self.file, framework="pt") as opened:
            return self._cast(opened.get_tensor(self.key))

    def leading(self, count: int) -> torch.Tensor:
        """Return `leading_values` of the weight, reading no more of the file than necessary."""
        with safe_open(self.file, framework="pt") as opened:
            part = opened.get_slice(self.key)
            shape = part.get_shape()
            rows = math.ceil(count / max(1, math.prod(shape[1:])))
            head = part[: min(rows, shape[0])] if shape else opened.get_tensor(self.key)
            return leading_values(self._cast(head), count)

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype) if values.is_floating_point() else values


Unread = dict[torch.nn.Parameter, Stored]  # weights that are still in their files


class _NotLazy(Exception):
    """Reason why a model cannot be loaded lazily."""


def fill(module: torch.nn.Module, unread: Unread) -> None:
    """Load the weights of `module` that are still in their files, and remove them from `unread`."""
    for parameter in module.parameters():
        if (stored := unread.pop(parameter, None)) is not None:
            parameter.data = stored.read().to(parameter.dtype)


def unread_models(folder: Path, names: list[str], dtype: torch.dtype) -> tuple[dict[str, torch.nn.Module], Unread]:
    """Return those of the components that can be loaded lazily, and their weights; log why others cannot."""
    index = DiffusionPipeline.load_config(folder)
    models: dict[str, torch.nn.Module] = {}
    unread: Unread = {}
    for name in names:
        try:
            if (kind := component_class(index[name])) is None:
                raise _NotLazy(f"its class {'.'.join(index[name])} is not from diffusers or transformers")
            models[name], left_out = _model(kind, folder / name, dtype)
        except _NotLazy as reason:
            logger.info("every rank reads all of %s before keeping its shard: %s", name, reason)
        else:
            unread |= left_out
    return models, unread


def _model(kind: type[Any], folder: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, Unread]:
    """Return a component without its weights, and where these are stored. Raises `_NotLazy`."""
    build, base = (_of_diffusers, ModelMixin) if issubclass(kind, ModelMixin) else (_of_transformers, PreTrainedModel)
    config = read_json(folder / "config.json")
    if config.get("quantization_config") is not None:
        raise _NotLazy("its weights are quantised in their files")
    files, shapes = _files(folder, NAMES[base])
    model, dtypes, keys = build(kind, folder, dtype, list(files))
    wanted = model.state_dict(keep_vars=True)
    aliases: dict[int, list[str]] = defaultdict(list)
    for name, tensor in wanted.items():
        aliases[id(tensor)].append(name)
    unread: Unread = {}
    with torch.no_grad():
        for names in aliases.values():
            tensor, present = wanted[names[0]], [name for name in names if name in keys]
            if len(present) != 1:
                raise _NotLazy(f"its files contain {names[0]} {len(present)} times")
            key = keys[present[0]]
            if shapes[key] != tuple(tensor.shape):
                raise _NotLazy(f"{key} has another shape in its file than {names[0]} in the model")
            stored = Stored(files[key], key, dtypes[present[0]])
            if isinstance(tensor, torch.nn.Parameter):
                unread[tensor] = stored
            else:
                tensor.data = stored.read()
    return model, _with_placeholders(model, unread)


def _with_placeholders(model: torch.nn.Module, unread: Unread) -> Unread:
    """Replace meta parameters, for which peft would make a meta LoRA, by ones without memory on the CPU."""
    placeholders: Unread = {}
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                stored = unread[parameter]
                values = torch.zeros((), dtype=stored.dtype).expand(parameter.shape)
                made[parameter] = torch.nn.Parameter(values, requires_grad=False)
                placeholders[made[parameter]] = stored
            module._parameters[name] = made[parameter]
    return placeholders


def _files(folder: Path, name: str) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Return file and shape of each tensor in one safetensors file, or several with an index. Raises `_NotLazy`."""
    index = folder / f"{name}.index.json"
    names = read_json(index)["weight_map"].values() if index.is_file() else [name]
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in (folder / name for name in dict.fromkeys(names)):
        if not file.is_file():
            raise _NotLazy(f"it has no {file.name}")
        with safe_open(regular(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                files[key], shapes[key] = file, tuple(opened.get_slice(key).get_shape())
    return files, shapes


Built = tuple[torch.nn.Module, dict[str, torch.dtype], dict[str, str]]  # model, dtype by name, file key by name


def _of_diffusers(kind: type[ModelMixin], folder: Path, dtype: torch.dtype, keys: list[str]) -> Built:
    """Build the model as `ModelMixin.from_pretrained` does before it reads the weights."""
    with accelerate.init_empty_weights(), default_dtype(dtype):
        model = kind.from_config(kind.load_config(folder))
    model.register_to_config(_name_or_path=str(folder))
    in_fp32 = type(model)._keep_in_fp32_modules or []
    in_fp32 = in_fp32 if isinstance(in_fp32, list) else [in_fp32]
    names = {key: key for key in keys}
    if not (folder / f"{NAMES[ModelMixin]}.index.json").is_file():
        model._fix_state_dict_keys_on_load(names)
    state = model.state_dict()
    dtypes = {name: torch.float32 if not set(in_fp32).isdisjoint(name.split(".")) else dtype for name in state}
    return model, dtypes, names


def _of_transformers(kind: type[PreTrainedModel], folder: Path, dtype: torch.dtype, keys: list[str]) -> Built:
    """Build the model as `PreTrainedModel.from_pretrained` does before it reads the weights."""
    if not has("transformers", TRANSFORMERS):
        raise _NotLazy(f"transformers is older than {TRANSFORMERS}")
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        build_glob_alternation,
        rename_source_key,
    )

    with accelerate.init_empty_weights():
        model = kind._from_config(kind.config_class.from_pretrained(folder), dtype=dtype)
    model.tie_weights()  # tied weights get lost in the context above
    model.config.name_or_path = str(folder)
    if model.can_generate():
        with contextlib.suppress(OSError):  # the file is optional
            model.generation_config = GenerationConfig.from_pretrained(folder)
    state = model.state_dict()
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    if plan := model._get_dtype_plan(dtype):  # weights kept in another dtype, such as a layer of T5 in fp16
        pattern, groups, _ = build_glob_alternation(list(plan))
        matches = {name: pattern.search(name) for name in state}
        dtypes |= {name: plan[groups[match.lastgroup]] for name, match in matches.items() if match}
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    names: dict[str, str] = {}
    for key in keys:
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, converter = rename_source_key(key, [], [], model.base_model_prefix, state)
        if converter is not None:
            raise _NotLazy(f"{name} is combined from several tensors of its files")
        if name in state and name in names:
            raise _NotLazy(f"its files contain {name} twice")
        names[name] = key
    return model, dtypes, names


# --- Sharded frozen weights: each rank of a worker holds a shard, and gathers a block's others while it computes.
#
# FSDP2 (`torch.distributed.fsdp.fully_shard`) on the repeated blocks and the rest of a model. The LoRA is replicated on
# every rank, so optimizer, averages, all-reduce, checkpoints and export do not change.


def sharded_components(
    pipe: DiffusionPipeline, denoisers: Mapping[str, torch.nn.Module], which: Literal["none", "denoiser", "all"]
) -> dict[str, torch.nn.Module]:
    """Return the components of `pipe` to shard, by name: the denoisers, and with "all" also the text encoders."""
    if which == "none":
        return {}
    encoders = {name: part for name, part in pipe.components.items() if isinstance(part, PreTrainedModel)}
    return {**denoisers, **(encoders if which == "all" else {})}


def shard(
    components: Mapping[str, torch.nn.Module],
    whole: set[torch.nn.Parameter],
    mesh: DeviceMesh,
    unread: Unread | None = None,
    on_cpu: bool = False,
    reshard: bool = True,
) -> None:
    """Shard the weights of `components` among the ranks of `mesh`, except the parameters `whole`.

    Weights, including those `unread` in their files, move to the device of the mesh block by block; `on_cpu`: shards
    stay on the CPU until their block computes; `reshard`: a denoiser's block drops its gathered weights after the
    forward pass, rather than after the backward pass. Raises `ModelError` for a component without repeated blocks.
    """
    files = {} if unread is None else unread
    parts = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if on_cpu else OffloadPolicy()
    for name, component in components.items():
        blocks = blocks_to_gather(component, f"model.shard: {name}", "model.shard=none")
        encodes = isinstance(component, PreTrainedModel)
        # pipelines call text encoders in many ways that bypass `forward`, but all of them end in calls of layers
        rest = layers(component, blocks) if encodes else [component]
        # torchao splits quantised weights into codes and scales, which can be sharded
        wrapped = [m for m in component.modules() if type(m._parameters.get("weight")).__module__.startswith("torchao")]
        if wrapped:
            from torchao.utils import UnwrapTensorSubclass  # an optional package
        for module in wrapped:
            register_parametrization(module, "weight", UnwrapTensorSubclass())
        for module in (*blocks, *rest):
            fill(module, files)
            drops = reshard or encodes  # text encoders have no backward pass
            fully_shard(module, mesh=mesh, ignored_params=whole, reshard_after_forward=drops, offload_policy=parts)
        fill(component, files)
        for tensor in (*component.parameters(), *component.buffers()):
            if not isinstance(tensor, DTensor):  # the rest: buffers, and weights that layers share
                tensor.data = tensor.data.to(mesh.device_type)


def blocks_to_gather(model: torch.nn.Module, what: str, remedy: str) -> list[torch.nn.Module]:
    """Return the `repeated_blocks` of `model`. Raises `ModelError` with `what` and `remedy` if it has none."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise ModelError(
            f"{what} ({type(model).__name__}) has no repeated blocks whose weights could be gathered one after the "
            f"other: use {remedy}"
        )
    return blocks


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the entries with weights of the outermost module lists in `model`, in order."""
    blocks: list[torch.nn.Module] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists.append(name)
            blocks += [entry for entry in module if next(entry.parameters(), None) is not None]
    return blocks


def layers(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the linear and embedding layers of `model` outside `blocks` whose weight no other layer shares."""
    inside = {module for block in blocks for module in block.modules()}
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    weighted = [module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)]
    return [module for module in weighted if module not in inside and uses[id(module.weight)] == 1]


# --- Context parallelism: ranks compute a denoiser call together, each a slice of the tokens.
#
# Diffusers' implementation of Ulysses: a rank holds a slice of the tokens, and in attention some of the heads for all
# tokens. Inputs and output are complete on every rank. A rank's backward pass gives the gradient from its slice; the
# sum over the ranks is the complete gradient.

MASKS = ("encoder_hidden_states_mask", "encoder_attention_mask")  # arguments that mask the tokens of a text
# denoisers whose plan does not work with their attention in diffusers 0.42
UNUSABLE = {
    "LTXVideoTransformer3DModel": "its text masks and token noise levels stay whole",
    "LTX2VideoTransformer3DModel": "its sound positions stay whole",
}
HEADS = ("num_attention_heads", "num_key_value_heads")  # suffixes of the configuration keys for numbers of heads


def check_context(components: Iterable[str], denoisers: Mapping[str, ModelMixin], ranks: int) -> None:
    """Raise `ModelError` if `ranks` cannot split the tokens of a denoiser; `components`: all names."""
    setting = f"cluster.context={ranks}"
    require("diffusers", "0.36", setting)
    if controlnet := next((name for name in components if "controlnet" in name), None):
        raise ModelError(f"{setting}: the output of {controlnet} is not split among ranks; use cluster.context=1")
    for name, denoiser in denoisers.items():
        kind, plan = f"{type(denoiser).__name__} ({name})", getattr(denoiser, "_cp_plan", None)
        lists = {n for n, module in denoiser.named_children() if isinstance(module, torch.nn.ModuleList)}
        heads = {key: value for key, value in denoiser.config.items() if key.endswith(HEADS) and value}
        remedy = "use cluster.context=1"
        if not plan:
            why = f"diffusers has no plan for splitting the sequence of {kind} among ranks"
        elif fault := UNUSABLE.get(type(denoiser).__name__):
            why = f"diffusers cannot split the sequence of {kind} among ranks, although it has a plan: {fault}"
        elif any(entry.partition(".")[0] in lists for entry, what in plan.items() if not isinstance(what, dict)):
            # layers between a gather and the next split would get a part of the gradient twice
            why = f"{kind} gathers its sequence in every block, where the gradient would not be that of one rank"
        elif odd := next((key for key, value in heads.items() if value % ranks), None):
            why = f"it must divide the {heads[odd]} attention heads of {type(denoiser).__name__} ({name}: {odd})"
            remedy = "use a number that does, or 1"
        else:
            continue
        raise ModelError(f"{setting}: {why}; {remedy}")


def divide_context(denoisers: Mapping[str, ModelMixin], mesh: DeviceMesh) -> None:
    """Let the ranks of `mesh` split each call of `denoisers`; after adding a LoRA, before sharding weights.

    Raises `ModelError` for an attention that does not support it.
    """
    from diffusers import ContextParallelConfig  # which older versions do not have, see `check_context`

    for name, denoiser in denoisers.items():
        with contextlib.ExitStack() as undo:
            if not torch.accelerator.device_count():  # diffusers numbers devices modulo their count
                put(undo, torch.accelerator, "device_count", lambda: 1)
            denoiser.enable_parallelism(config=ContextParallelConfig(ulysses_degree=mesh.size(), mesh=mesh))
        for part, module in denoiser.named_modules():
            if not isinstance(module, Attention | MochiAttention | AttentionModuleMixin):
                continue
            if getattr(module.processor, "_parallel_config", None) is None:  # it would attend only to its slice
                raise ModelError(
                    f"cluster.context={mesh.size()}: {type(module.processor).__name__} ({name}.{part}) does not "
                    "attend to tokens of other ranks; use cluster.context=1"
                )
        registry = HookRegistry.check_if_exists_or_initialize(denoiser)
        registry.register_hook(Together(denoiser, mesh.size()), "gerl_context")


class Together(ModelHook):
    """Outermost hook of a denoiser, which pads texts that have a mask and rejects tokens that cannot be split.

    Pipelines truncate texts to the longest of a batch, whose length need not be a multiple of the number of ranks.
    """

    def __init__(self, denoiser: ModelMixin, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        parameters, plan = inspect.signature(denoiser.forward).parameters, getattr(denoiser, "_cp_plan", None) or {}
        divided = any("encoder_hidden_states" in what for what in plan.values() if isinstance(what, dict))
        # the mask argument of a text that is split
        self.mask = next((name for name in MASKS if name in parameters), None) if divided else None

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.mask is not None:
            kwargs |= self.padded(kwargs, self.mask)
        try:
            return self.fn_ref.original_forward(*args, **kwargs)
        except AssertionError as error:
            if "divisible by mesh" not in str(error):
                raise
            shapes = ", ".join(
                f"{name} {list(value.shape)}"
                for name, value in kwargs.items()
                if name.endswith("hidden_states") and torch.is_tensor(value)
            )
            raise ModelError(
                f"cluster.context={self.ranks}: the tokens of a call of {type(module).__name__} cannot be split "
                f"equally among this many ranks ({shapes}): choose sampling.height and sampling.width, and "
                "num_frames or max_sequence_length in sampling.call, that give a multiple of it, or lower it"
            ) from None

    def padded(self, given: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return text and mask, padded with masked tokens to a multiple of the number of ranks."""
        text, mask = given.get("encoder_hidden_states"), given.get(name)
        if not torch.is_tensor(text) or not (missing := -text.shape[1] % self.ranks):
            return {}
        if mask is None:
            mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        more = text.new_zeros(len(text), missing, *text.shape[2:]), mask.new_zeros(len(mask), missing)
        return {"encoder_hidden_states": torch.cat([text, more[0]], 1), name: torch.cat([mask, more[1]], 1)}
