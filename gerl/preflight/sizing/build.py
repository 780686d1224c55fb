"""A pipeline of real size without weights: from the configurations of a folder, the hub's cache, or gerl's record."""

import importlib
import inspect
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
import yaml
from diffusers import DiffusionPipeline, ModelMixin
from huggingface_hub import try_to_load_from_cache

from gerl.config import Config
from gerl.config.algorithms import Teacher
from gerl.errors import ModelError
from gerl.model.denoisers import default_dtype, find_denoisers
from gerl.model.loading import prepare
from gerl.model.lora import ADAPTER, add_lora
from gerl.model.paths import INDEX, resolve
from gerl.model.policy import EMA, Policy, chosen, parameters_of
from gerl.model.teachers import TeacherModel, add_fake, fake_parameters, in_teachers
from gerl.preflight.sizing.stage import Stage
from gerl.preflight.sizing.tokens import Picture, Tokens

RECORD = "architectures.yaml"  # among gerl's assets


def architectures() -> dict[str, Any]:
    """The architectures on record: `models` of the hub, and the `parts` that several of them have."""
    found = yaml.safe_load((resources.files("gerl") / "assets" / RECORD).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def known_models() -> list[str]:
    """Hub ids of the models whose architecture gerl has on record."""
    return list(architectures()["models"])


def named_on_record(path: str) -> str:
    """The hub id under which the model of `path` is on record; `path` itself where it is a folder, or unknown."""
    also = {model["also"]: name for name, model in architectures()["models"].items() if "also" in model}
    return path if Path(path).is_dir() else also.get(path, path)


def build_pipeline(path: str, dtype: torch.dtype, device: str = "meta") -> DiffusionPipeline:
    """The pipeline of `path` without its weights, in the precisions in which `load_pipeline` has them.

    On another `device` than meta, they are as their classes initialise them.

    Raises `ModelError` where the architecture is not known, or has a class that cannot be built.
    """
    path = named_on_record(path)
    given = resolve(path)
    folder = Path(given) if Path(given).is_dir() else _cached(given)
    if folder is None and path not in known_models():
        raise ModelError(
            f"model.path={path!r} is not in the Hub cache, and its architecture is not known "
            f"({', '.join(known_models())}): set model.path to a folder with its model_index.json and the "
            "config.json of every component"
        )
    try:
        pipe = _from_folder(folder, dtype, device) if folder is not None else _from_record(path, dtype, device)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"model.path={path!r} cannot be sized, since it cannot be built without weights: {first}"
        ) from error
    prepare(pipe, half=dtype != torch.float32)
    return pipe


def build_policy(config: Config, dtype: torch.dtype, stage: Stage | None) -> Policy:
    """As `load_policy`, but of shapes, which run on `stage`; with None, of weights that nobody has trained."""
    model, device = config.model, "meta" if stage is not None else "cpu"
    pipe = build_pipeline(model.path, dtype, device)
    denoisers, whole = find_denoisers(pipe), model.train != "lora"
    for denoiser in denoisers.values():
        denoiser.requires_grad_(False)
        with torch.device(device):
            if not whole:
                add_lora(denoiser, model.lora_rank, model.lora_alpha, model.lora_targets, 0)
    if config.algorithm.imitates:
        with torch.device(device):
            add_fake(denoisers, 1.0, device, 0)
    if whole:
        for p in parameters_of(denoisers, chosen(model.train, denoisers)).values():
            p.requires_grad_()
    if stage is not None:
        stage.put_on(pipe)
    trained = {
        f"{name}.{key}": p
        for name, denoiser in denoisers.items()
        for key, p in denoiser.named_parameters()
        if p.requires_grad
    }
    trained |= fake_parameters(denoisers)
    policy = Policy(pipe, denoisers, trained, EMA(trained, config.actor.ema_decay), whole=whole)
    policy.teachers = [_teacher(teacher, dtype, device, stage) for teacher in config.algorithm.taught_by]
    return policy


def _teacher(teacher: Teacher, dtype: torch.dtype, device: str, stage: Stage | None) -> TeacherModel:
    """A teacher of shapes; in the place of its LoRA the trained one computes."""
    if teacher.path is None:
        return TeacherModel(teacher, None if teacher.is_base else ADAPTER)
    try:
        pipe = build_pipeline(teacher.path, dtype, device)
    except ModelError as error:
        raise ModelError(in_teachers(str(error), f"path={teacher.path!r}")) from None
    if stage is not None:
        stage.put_on(pipe)
    return TeacherModel(teacher, pipe=pipe)


def _cached(path: str) -> Path | None:
    """The folder of a hub id in the hub's cache, if all of its configurations are there."""
    index = try_to_load_from_cache(path, INDEX)
    if not isinstance(index, str):
        return None
    folder = Path(index).parent
    parts = [name for name, value in json.loads(Path(index).read_text()).items() if _is_component(value)]
    return folder if all((folder / name).is_dir() for name in parts) else None


def _is_component(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _from_folder(folder: Path, dtype: torch.dtype, device: str) -> DiffusionPipeline:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    if not isinstance(index["_class_name"], str):
        raise ValueError("its pipeline is custom code")
    components: dict[str, Any] = {}
    for name, value in index.items():
        if _is_component(value):
            library, kind = value
            components[name] = _component(_class(f"{library}.{kind}"), folder / name, dtype, device)
        elif not name.startswith("_"):
            components[name] = None if value == [None, None] else value
    return _assembled(getattr(diffusers, index["_class_name"]), components)


def _component(kind: type, folder: Path, dtype: torch.dtype, device: str) -> Any:
    if not issubclass(kind, torch.nn.Module):
        return kind.from_pretrained(folder)  # type: ignore[attr-defined]
    return _module(kind, json.loads((folder / "config.json").read_text(encoding="utf-8")), dtype, device)


def _from_record(path: str, dtype: torch.dtype, device: str) -> DiffusionPipeline:
    record = architectures()
    model = record["models"][path]
    components: dict[str, Any] = {}
    for name, value in model["components"].items():
        part = record["parts"][value] if isinstance(value, str) else value
        if isinstance(part, dict) and "tokens" in part:
            picture = Picture(**part["picture"]) if "picture" in part else None
            components[name] = Tokens(part["tokens"], part.get("end", 2), picture)
        elif isinstance(part, dict):
            components[name] = build_part(part, dtype, device)
        else:
            components[name] = part
    return _assembled(getattr(diffusers, model["pipeline"]), components)


def build_part(part: Mapping[str, Any], dtype: torch.dtype, device: str) -> Any:
    """A component on record, by its class and the arguments of its configuration."""
    kind = _class(part["class"])
    if not issubclass(kind, torch.nn.Module):
        return kind(**part["config"])
    return _module(kind, part["config"], dtype, device)


def _assembled(kind: type[DiffusionPipeline], components: Mapping[str, Any]) -> DiffusionPipeline:
    accepted = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in components.items() if name in accepted})


def _class(name: str) -> type:
    library, _, kind = name.rpartition(".")
    module = importlib.import_module(library) if library in ("diffusers", "transformers") else None
    found = getattr(module or diffusers, kind, None) or getattr(transformers, kind, None)
    if found is None:
        found = getattr(importlib.import_module(f"diffusers.pipelines.{library}"), kind)
    assert isinstance(found, type)
    return found


def _module(kind: Any, config: dict[str, Any], dtype: torch.dtype, device: str) -> torch.nn.Module:
    """A component as its class initialises it, in `dtype` but for the parts that its class keeps in fp32."""
    with torch.device(device), default_dtype(dtype):
        if issubclass(kind, ModelMixin):
            module: torch.nn.Module = kind.from_config({k: v for k, v in config.items() if not k.startswith("_")})
            kept = kind._keep_in_fp32_modules or []
        else:
            given = kind.config_class(**{k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")})
            module = kind(given)
            kept = getattr(module, "_keep_in_fp32_modules_strict", None) or []
            if dtype == torch.float16:
                kept = [*kept, *(getattr(module, "_keep_in_fp32_modules", None) or [])]
    for name, parameter in module.named_parameters():
        if any(part in name.split(".") for part in kept):
            parameter.data = parameter.data.float()
    return module
