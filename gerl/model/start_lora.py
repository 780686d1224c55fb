"""The initial LoRA, `model.lora`, which initialises the trained one or is merged into the base model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import torch

from gerl.config import ModelConfig
from gerl.config.bounded_text import regular
from gerl.errors import ModelError
from gerl.model.hub import fetch_lora
from gerl.model.lora import ADAPTER, targets_of
from gerl.model.lora_files import LARGEST, Denoisers, Layers, check_fit, files_of, pointwise_layers, read_layers
from gerl.model.paths import local_lora

logger = logging.getLogger(__name__)


def read_fitting(source: str, denoisers: Denoisers, merged: bool = False) -> dict[str, Layers]:
    """Read the LoRA `source`, a file, folder or Hub id, by denoiser. Raises `ModelError` if it does not fit."""
    by_denoiser = read_layers(local_lora(source) or fetch_lora(source), denoisers)
    for name, layers in by_denoiser.items():
        check_fit(layers, denoisers[name], name)
        if not merged and (other := sorted(layers.keys() & pointwise_layers(denoisers[name]).keys())):
            raise ModelError(
                f"it has a LoRA of convolutions, such as {other[0]}, which can be merged but not trained: use "
                "model.merge_lora=true, or a file without them"
            )
    return by_denoiser


def read_start(config: ModelConfig, denoisers: Denoisers) -> dict[str, Layers]:
    """Read `model.lora` by denoiser (or skeleton); a LoRA on the Hub is fetched into the cache.

    Raises `ModelError` if it cannot be read, or does not fit the denoisers or, unless merged, the keys of the LoRA.
    """
    assert config.lora is not None
    try:
        by_denoiser = read_fitting(config.lora, denoisers, config.merge_lora)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith("model.lora=") else f"model.lora={config.lora!r}: {text}") from None
    if not config.merge_lora:
        targets = targets_of(denoisers, config.lora_targets)
        for name, layers in by_denoiser.items():
            _check_keys(config, layers, targets.get(name, []))
    return by_denoiser


def _check_keys(config: ModelConfig, layers: Layers, targets: Sequence[str]) -> None:
    """Raise `ModelError` if the trained LoRA cannot represent these layers."""
    setting, instead = f"model.lora={config.lora!r}", "or train a new one on top of it with model.merge_lora=true"
    rank = max(halves.rank for halves in layers.values())
    if rank > config.lora_rank:
        raise ModelError(
            f"{setting} has rank {rank}, which does not fit in a LoRA of model.lora_rank={config.lora_rank}: use "
            f"model.lora_rank={rank}, {instead}"
        )
    if outside := [layer for layer in layers if layer not in set(targets)]:
        raise ModelError(
            f"{setting} has weights for {outside[0]}, which is not among the layers that "
            f"model.lora_targets={config.lora_targets or 'null'} trains: use an expression that matches its layers "
            f"too, {instead}"
        )


@torch.no_grad()
def begin_with(start: Mapping[str, Layers], denoisers: Denoisers) -> None:
    """Initialise the LoRAs just added to `denoisers` from `start`, with the same outputs.

    A lower rank fills the first rows; other rows of A stay random and those of B zero; B compensates for the scale.
    """
    for name, layers in start.items():
        for layer, halves in layers.items():
            adapted = denoisers[name].get_submodule(layer)
            a, b, scale = (getattr(adapted, part)[ADAPTER] for part in ("lora_A", "lora_B", "scaling"))
            a.weight[: halves.rank] = halves.a.to(a.weight)
            b.weight[:, : halves.rank] = halves.b.to(b.weight) * (halves.scale / scale)


def content_digest(source: str) -> str:
    """Return a digest of the files of the LoRA `source`: file, folder or Hub id."""
    digest = hashlib.sha256()
    for file in files_of(local_lora(source) or fetch_lora(source)):
        digest.update(regular(file, LARGEST).read_bytes())
    return digest.hexdigest()
