"""Teachers that are pipelines of their own: loaded beside the student's, with its noise levels."""

import copy
import logging
from dataclasses import replace
from pathlib import Path

import diffusers
from diffusers import DiffusionPipeline
from torch.distributed.device_mesh import DeviceMesh

from gerl.config import ModelConfig, SamplingConfig
from gerl.config.algorithms import NAME, Teacher
from gerl.errors import ModelError
from gerl.model.call import check_arguments
from gerl.model.denoisers import denoisers_among, find_denoisers
from gerl.model.hub import fetch
from gerl.model.loading import load_pipeline
from gerl.model.paths import resolve
from gerl.model.policy import Policy
from gerl.model.sharding import shard, sharded_components
from gerl.model.skeletons import skeletons
from gerl.model.teachers import in_teachers, read_teachers
from gerl.objects import pipeline

logger = logging.getLogger(__name__)


def check_teachers(teachers: list[Teacher], config: ModelConfig, sampling: SamplingConfig) -> None:
    """Find out what can be known of teachers before weights are loaded; what is on the hub is fetched into its cache.

    Raises `ModelError` for a LoRA that cannot be read or does not fit, and for a pipeline that there is not, is of
    another class than that of `config`, or does not take a teacher's arguments.
    """
    folder, own = _found(config.path)
    kind = getattr(diffusers, own, None) if own is not None else None
    for teacher in teachers:
        if isinstance(kind, type) and teacher.changed:
            try:
                check_arguments(kind, replace(sampling, call={**sampling.call, **teacher.changed}))
            except ModelError as error:
                raise ModelError(f"{NAME}: {error}") from None
        if teacher.path is not None:
            try:
                found = _found(teacher.path)[1]
            except ModelError as error:
                raise ModelError(in_teachers(str(error), f"path={teacher.path!r}")) from None
            _check_class(teacher.path, found, own)
    if any(teacher.lora is not None for teacher in teachers) and folder is not None:
        models = skeletons(folder)
        if models is not None:  # else its own code has to build them
            read_teachers(teachers, denoisers_among(models))


def _found(path: str) -> tuple[str | None, str | None]:
    """The folder of a pipeline and the name of its class, as far as they are known."""
    if isinstance(offered := pipeline(path), DiffusionPipeline):
        return None, type(offered).__name__
    given = resolve(path)
    folder = given if Path(given).is_dir() else fetch(given)
    name = DiffusionPipeline.load_config(folder)["_class_name"]
    return folder, name if isinstance(name, str) else None


def _check_class(path: str, found: str | None, expected: str | None) -> None:
    if found != expected and None not in (found, expected):
        raise ModelError(
            f"{NAME}: path={path!r} is a {found}, and the student a {expected}: a teacher takes the student's "
            "steps, so use one of the same class with the same latents"
        )


def load_teachers(policy: Policy, config: ModelConfig, device: str, mesh: DeviceMesh | None) -> None:
    """Give the teachers of `policy` that are pipelines of their own theirs, each pipeline once, and log who teaches.

    `mesh`: as for `load_policy`. Raises `ModelError` as `load_teacher`.
    """
    paths = dict.fromkeys(t.teacher.path for t in policy.teachers if t.teacher.path is not None)
    pipes = {path: load_teacher(path, config, policy.pipe, device, mesh) for path in paths}
    policy.teachers = [t if t.teacher.path is None else replace(t, pipe=pipes[t.teacher.path]) for t in policy.teachers]
    for t in policy.teachers:
        logger.info("teacher: %s", t.teacher)
    if config.merge_lora and any(t.adapter for t in policy.teachers):
        logger.info("teacher LoRAs are applied on top of the base model, into which %s is merged", config.lora)


def load_teacher(
    path: str, config: ModelConfig, student: DiffusionPipeline, device: str, mesh: DeviceMesh | None
) -> DiffusionPipeline:
    """The pipeline of a teacher, kept as `config` says of the student's, with the student's noise levels.

    Raises `ModelError` as `load_pipeline`, and for one of another class, or whose model predicts something else.
    """
    try:
        own = replace(config, path=path, lora=None, merge_lora=False, train="lora", compile=None)
        pipe = load_pipeline(own, device, to_shard=mesh is not None)
    except ModelError as error:
        raise ModelError(in_teachers(str(error), f"path={path!r}")) from None
    _check_class(path, type(pipe).__name__, type(student).__name__)
    found, expected = pipe.scheduler, student.scheduler
    for name in ("prediction_type", "sigma_data"):
        values = found.config.get(name), expected.config.get(name)
        if values[0] != values[1]:
            raise ModelError(
                f"{NAME}: path={path!r} has a scheduler with {name}={values[0]}, and the student's has "
                f"{values[1]}: their predictions differ in kind, use another teacher"
            )
    # the student's, since the states that it is asked about have the noise of the student's levels
    pipe.scheduler = copy.deepcopy(expected)
    if mesh is not None:
        shard(
            sharded_components(pipe, find_denoisers(pipe), config.shard), set(), mesh, None, config.offload == "blocks"
        )
    return pipe
