"""Export of a run with full fine-tuning: its denoisers, or a LoRA that approximates them."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch

from gerl.config.bounded_text import read_json
from gerl.errors import ModelError
from gerl.export.base import Base
from gerl.export.files import merged_pipeline, stored_dtypes
from gerl.model.components import weights_checked
from gerl.model.lora_files import Lora
from gerl.model.shards import Shards
from gerl.run.checkpoint import PARTS, Checkpoint, models_in
from gerl.utils.versions import DTYPE

logger = logging.getLogger("gerl")
KINDS = {"ema": "ema/", "raw": "weights/"}  # prefixes of tensor names in a checkpoint
EXACT = 1024  # rows or columns up to which a full SVD is fast


def trained_weights(checkpoint: Checkpoint, kind: str) -> tuple[Shards, dict[str, str]]:
    """Return the state of a checkpoint, and the tensor names of the trained weights by `denoiser.parameter`."""
    shards = Shards(checkpoint.path / PARTS)
    prefix = KINDS[kind]
    return shards, {name.removeprefix(prefix): name for name in shards.shapes() if name.startswith(prefix)}


def write_denoisers(checkpoint: Checkpoint, kind: str, out: Path) -> None:
    """Write each denoiser into a diffusers folder in `out`, in its computing precision."""
    for name, folder in models_in(checkpoint.path).items():
        if kind == "ema":
            for file in checkpoint.files:  # no others: a link may lead to any file
                if file.startswith(f"{name}/"):
                    (out / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(folder.parent / file, out / file)
            continue
        entry = read_json(folder / "config.json")["_class_name"]
        model_class = getattr(diffusers, entry, None)
        if model_class is None:
            raise ModelError(f"{name} is of the class {entry}, which diffusers does not have: use weights=ema")
        with weights_checked():
            model = model_class.from_pretrained(folder, **{DTYPE: stored_dtypes(folder.parent)[name]})
        _copy_weights(checkpoint, kind, {name: model})
        model.save_pretrained(out / name)


def whole_pipeline(checkpoint: Checkpoint, kind: str, base: Base) -> diffusers.DiffusionPipeline:
    """Return the base pipeline with the trained weights, in the precision of its files."""
    pipe = merged_pipeline({}, base)
    _copy_weights(checkpoint, kind, pipe.components)
    return pipe


@torch.no_grad()
def _copy_weights(checkpoint: Checkpoint, kind: str, models: Mapping[str, object]) -> None:
    shards, names = trained_weights(checkpoint, kind)
    for full, name in names.items():
        denoiser, _, key = full.partition(".")
        if (model := models.get(denoiser)) is not None:
            parameter(model, key, full).copy_(shards.whole(name))


def parameter(model: object, key: str, full: str) -> torch.nn.Parameter:
    """Return a parameter by name. Raises `ModelError` if the model has none."""
    try:
        assert isinstance(model, torch.nn.Module)
        return model.get_parameter(key)
    except (AttributeError, AssertionError):
        raise ModelError(
            f"the base model has no {full}, which the run trained: use the model it was trained on"
        ) from None


@torch.no_grad()
def extract(checkpoint: Checkpoint, kind: str, base: Base, rank: int) -> dict[str, Lora]:
    """Return LoRAs of `rank` that best approximate the change of the trained linear layers, by truncated SVD.

    Alpha is the rank. Raises `ModelError` if no linear layer changed.
    """
    shards, names = trained_weights(checkpoint, kind)
    pipe = merged_pipeline({}, base)
    layers: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
    everything = linear = retained = 0.0
    for full, name in names.items():
        denoiser, _, key = full.partition(".")
        model = pipe.components.get(denoiser)
        change = shards.whole(name).float() - parameter(model, key, full).float()
        square = float(change.double().square().sum())
        everything += square
        layer, _, last = key.rpartition(".")
        if last != "weight" or not isinstance(model.get_submodule(layer), torch.nn.Linear):
            continue
        linear += square
        a, b = low_rank_factors(change, rank)
        retained += square - float((change - b @ a).double().square().sum())
        layers.setdefault(denoiser, {})[layer] = (a, b)
    if not linear:
        raise ModelError("the run changed no weight of a linear layer that a LoRA could approximate: remove rank")
    logger.info(
        "the LoRA of rank %d captures %.1f %% of the squared change of the linear layers, which account for %.1f %% of "
        "that of all weights",
        *(rank, 100 * retained / linear, 100 * linear / everything),
    )
    return {name: Lora(halves, float(rank)) for name, halves in layers.items()}


def low_rank_factors(change: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `A [rank, in]` and `B [out, rank]` with `B A` nearest to `change` `[out, in]` (Eckart and Young 1936).

    Rows of A beyond `min(out, in)` are 0.
    """
    if min(change.shape) <= max(EXACT, 2 * rank):
        u, s, vh = torch.linalg.svd(change, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(change, q=2 * rank, niter=4)
        vh = v.mT
    count = min(rank, len(s))
    root = s[:count].sqrt()
    a, b = change.new_zeros(rank, change.shape[1]), change.new_zeros(change.shape[0], rank)
    a[:count], b[:, :count] = root[:, None] * vh[:count], u[:, :count] * root
    return a, b
