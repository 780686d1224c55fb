"""`model.lora`: the LoRA that training starts from, as the beginning of the trained one or merged into the base."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from gerl.config import ModelConfig
from gerl.errors import ModelError
from gerl.model.hub import fetch_lora
from gerl.model.lora import ADAPTER, find_targets
from gerl.model.lora_files import Denoisers, Layers, read_layers
from gerl.model.lora_layouts import merge_halves
from gerl.model.lora_weights import check_fit
from gerl.model.paths import local_lora

logger = logging.getLogger(__name__)


def read_start(config: ModelConfig, denoisers: Denoisers) -> dict[str, Layers]:
    """The LoRA of `model.lora` by denoiser; a LoRA of the hub is fetched into its cache.

    `denoisers`: those of the pipeline, or their skeletons. Raises `ModelError` if it cannot be read, or does not fit
    them, or, where it is not merged, `model.lora_rank` and `model.lora_targets`.
    """
    assert config.lora is not None
    try:
        found = read_layers(place_of(config.lora), denoisers)
        for name, layers in found.items():
            check_fit(layers, denoisers[name], name)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith("model.lora=") else f"model.lora={config.lora!r}: {text}") from None
    if not config.merge_lora:
        for name, layers in found.items():
            _check_keys(config, layers, denoisers[name])
    return found


def place_of(source: str) -> Path:
    """The file or folder of a LoRA; one of the hub is fetched into its cache."""
    return local_lora(source) or fetch_lora(source)


def _check_keys(config: ModelConfig, layers: Layers, denoiser: torch.nn.Module) -> None:
    """Raise `ModelError` if the trained LoRA cannot hold these layers."""
    given, instead = f"model.lora={config.lora!r}", "or train a new one on top of it with model.merge_lora=true"
    rank = max(halves.rank for halves in layers.values())
    if rank > config.lora_rank:
        raise ModelError(
            f"{given} has rank {rank}, which does not fit in a LoRA of model.lora_rank={config.lora_rank}: use "
            f"model.lora_rank={rank}, {instead}"
        )
    targets = set(find_targets(denoiser, config.lora_targets))
    if outside := [layer for layer in layers if layer not in targets]:
        raise ModelError(
            f"{given} has weights for {outside[0]}, which is not among the layers that "
            f"model.lora_targets={config.lora_targets or 'null'} trains: use an expression that matches its layers "
            f"too, {instead}"
        )


@torch.no_grad()
def begin_with(start: Mapping[str, Layers], denoisers: Denoisers) -> None:
    """Let the LoRAs just added to `denoisers` begin as `start`: the model then computes what it does with that.

    A layer of a lower rank than `model.lora_rank` gets it in its first rows, what remains of A is drawn and of B zero;
    B takes up the difference of the scales. With the same rank and alpha the matrices are those of the file.
    """
    for name, layers in start.items():
        for layer, halves in layers.items():
            adapted = denoisers[name].get_submodule(layer)
            a, b, scale = (getattr(adapted, part)[ADAPTER] for part in ("lora_A", "lora_B", "scaling"))
            a.weight[: halves.rank] = halves.a.to(a.weight)
            b.weight[:, : halves.rank] = halves.b.to(b.weight) * (halves.scale / scale)


def merge_start(config: ModelConfig, denoisers: Denoisers) -> None:
    """Add `model.lora` to the weights of `denoisers`: computed in fp32, rounded once to their precision."""
    for name, layers in read_start(config, denoisers).items():
        merge_halves(layers, denoisers[name])
    logger.info("%s is merged into the base model", config.lora)
