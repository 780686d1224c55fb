"""LoRA on any denoiser: where it goes, switching it off, and its file in diffusers' format."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import accelerate
import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders import PeftAdapterMixin
from diffusers.utils import recurse_remove_peft_layers
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer

from gerl.errors import ModelError
from gerl.model.lora_weights import METADATA, check_components, inject, read_lora
from gerl.model.paths import WEIGHTS
from gerl.utils.tensors import pack_tensors

# what in a repeated block is neither attention nor feed-forward: modulation, embeddings, resnets, routers
NOT_TRAINED = re.compile(r"norm|embed|(?<![a-z])mod(?![a-z])|modulat|time|resnet|router|adaln", re.IGNORECASE)
ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)  # in the name of a class
ADAPTER = "default"  # peft's name of the trained LoRA


def default_targets(denoiser: torch.nn.Module) -> list[str]:
    """Names of the attention and feed-forward linear layers in the repeated blocks of `denoiser`.

    A repeated block is an entry of a `ModuleList` with a module in it that calls itself an attention; where none does,
    every entry is one.
    """
    modules = dict(denoiser.named_modules())
    entries = {name for name in modules if isinstance(modules.get(name.rpartition(".")[0]), torch.nn.ModuleList)}
    attentions = [name for name, module in modules.items() if ATTENTION.search(type(module).__name__)]
    blocks = entries & {above for name in attentions for above in _path(name)} or entries

    def is_target(name: str) -> bool:
        *above, _ = _path(name)
        # torch's attention reads the weights of its linear layers past their `forward`, and with it past a LoRA
        inert = any(
            "Resnet" in type(modules[a]).__name__ or isinstance(modules[a], torch.nn.MultiheadAttention) for a in above
        )
        return not inert and not blocks.isdisjoint(above) and not NOT_TRAINED.search(name)

    return [name for name, module in modules.items() if isinstance(module, torch.nn.Linear) and is_target(name)]


def _path(name: str) -> list[str]:
    """The names of the modules around the module `name`, outermost first, and its own."""
    return [name[:i] for i, c in enumerate(name) if c == "."] + [name]


def plain_layers(denoiser: torch.nn.Module) -> set[str] | None:
    """Names of the linear layers that the class of `denoiser` makes of its configuration; None where it has none.

    Those of an IP-Adapter or of fused projections are not among them: a plain pipeline cannot load a LoRA of them.
    """
    if not isinstance(denoiser, ModelMixin):
        return None
    with accelerate.init_empty_weights():
        plain = type(denoiser).from_config(denoiser.config)
    return {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}


def find_targets(denoiser: torch.nn.Module, pattern: str | None) -> list[str]:
    """Names of the linear layers of `denoiser` that get a LoRA; raises `ModelError` if there are none.

    `pattern`: regular expression searched in the layers' names; None: `default_targets`. Layers that a plain model of
    the class has not are left out, see `plain_layers`.
    """
    plain = plain_layers(denoiser)
    linear = [
        name
        for name, module in denoiser.named_modules()
        if isinstance(module, torch.nn.Linear) and (plain is None or name in plain)
    ]
    if pattern is None:
        found = [name for name in default_targets(denoiser) if plain is None or name in plain]
    else:
        try:
            found = [name for name in linear if re.search(pattern, name)]
        except re.error as error:
            raise ModelError(f"model.lora_targets={pattern!r} is not a valid regular expression: {error}") from None
    if not found:
        raise ModelError(
            f"model.lora_targets={pattern!r} matches none of the {len(linear)} linear layers of "
            f"{type(denoiser).__name__}; their names look like {', '.join(linear[:3])}"
        )
    return found


def add_lora(
    denoiser: torch.nn.Module, rank: int, alpha: float, pattern: str | None, seed: int
) -> dict[str, torch.nn.Parameter]:
    """Freeze `denoiser`, add a LoRA and return its parameters (fp32) by name.

    A is Gaussian, drawn from `seed`; B is zero, so the output is at first bitwise that of the base model.
    """
    denoiser.requires_grad_(False)
    targets = find_targets(denoiser, pattern)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        init_lora_weights="gaussian",
        target_modules=targets,
        exclude_modules=_mistaken(denoiser, set(targets)) or None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(denoiser, PeftAdapterMixin):
            denoiser.add_adapter(config, ADAPTER)
        else:  # older denoisers and those of custom pipelines
            inject_adapter_in_model(config, denoiser, ADAPTER)
    parameters = {name: p for name, p in denoiser.named_parameters() if p.requires_grad}
    for p in parameters.values():
        p.data = p.data.float()
    return parameters


def remove_lora(denoiser: torch.nn.Module) -> None:
    """Take a LoRA off again: `denoiser` has its own layers, as before `add_lora`."""
    if isinstance(denoiser, PeftAdapterMixin):
        denoiser.unload_lora()
    else:
        recurse_remove_peft_layers(denoiser)
        if hasattr(denoiser, "peft_config"):
            del denoiser.peft_config


def _mistaken(denoiser: torch.nn.Module, targets: set[str]) -> list[str]:
    """Modules that peft would take for one of `targets`, since their names end in its name after a dot."""
    names = [name for name, _ in denoiser.named_modules() if name not in targets]
    return [name for name in names if any(name[i + 1 :] in targets for i, c in enumerate(name) if c == ".")]


@contextlib.contextmanager
def lora_disabled(denoisers: list[torch.nn.Module]) -> Iterator[None]:
    """The base model: switches the adapter layers themselves, since not every denoiser has `disable_adapters`."""
    layers = [m for d in denoisers for m in d.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def lora_file(denoisers: dict[str, ModelMixin]) -> bytes:
    """The current LoRA as a safetensors file in diffusers' format, alpha included; names are `denoiser.parameter`.

    `pipe.load_lora_weights(folder)` of plain diffusers reads it, for those denoisers that the pipeline can load a LoRA
    of. For others, such as a second transformer, `pipe.NAME.load_lora_adapter(folder, prefix="NAME",
    use_safetensors=True)` does; for those without this method, `load_lora`.
    """
    weights: dict[str, torch.Tensor] = {}
    metadata: dict[str, object] = {}
    for name, denoiser in denoisers.items():
        weights |= {f"{name}.{key}": v for key, v in get_peft_model_state_dict(denoiser).items()}
        config = denoiser.peft_config[ADAPTER].to_dict()
        metadata |= {f"{name}.{key}": sorted(v) if isinstance(v, set) else v for key, v in config.items()}
    return pack_tensors(weights, {"format": "pt", METADATA: json.dumps(metadata, indent=2, sort_keys=True)})


def load_lora(pipe: DiffusionPipeline, path: Path) -> None:
    """Put the LoRA in `path` (a file of `lora_file`, or the folder with it) on the denoisers of `pipe`, of any class.

    Raises `ModelError` for another file, or one that does not fit the pipeline.
    """
    file = path / WEIGHTS if path.is_dir() else path
    loras = read_lora(file)
    if loras is None:
        raise ModelError(f"{file} is not a LoRA written by gerl: use one, or {type(pipe).__name__}.load_lora_weights")
    check_components(loras, pipe, file)
    for denoiser, lora in loras.items():
        inject(pipe.components[denoiser], lora, ADAPTER)
