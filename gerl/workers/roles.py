"""A process with several policies, those of the roles of an episode, and the fleet that addresses one of them.

Recovery, checkpoints and synchronisation see one worker, whose state is that of all its roles.
"""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from gerl.algorithms import Algorithm, build_algorithm
from gerl.algorithms.token_grpo import TextTape, TokenGRPO
from gerl.cluster import Pending, WorkerGroup
from gerl.config import Config
from gerl.config.roles import role_config, signature
from gerl.errors import CheckpointError, ConfigError
from gerl.protocol import Images, ModelFacts, RolloutTask, Sample
from gerl.utils.imports import importing
from gerl.utils.seeding import derive_seed, seed_everything
from gerl.utils.tensors import PackedFiles, pack_tensors, unpack_tensors
from gerl.workers.fleet import LocalFleet
from gerl.workers.worker import PolicyWorker

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from gerl.model.language import LanguageModel
    from gerl.model.policy import Policy
    from gerl.run.checkpoint import WorkerFiles, WorkerState

P = ParamSpec("P")
R = TypeVar("R")
STATE = "state.safetensors"
FOLDER = "roles"  # of a checkpoint, with a folder per role


class RoleWorker(PolicyWorker):
    """Worker with the policy of the run's own role, and those of the other roles in `others`."""

    def __init__(self, config: Config, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        self.others: dict[str, OtherRole] = {}

    def setup(self, remote: bool = False) -> ModelFacts:
        """Load all policies; the facts are those of the own role, with the notes of the others."""
        facts = super().setup(remote)
        notes, warnings = [*facts.notes], [*facts.warnings]
        for name in self.config.episode.roles:
            self.others[name] = role = role_worker(self.config, name)(name, self)
            of_role = role.setup()
            notes += [f"{name}: {note}" for note in of_role.notes]
            notes.append(f"{name}: {of_role.pipeline}, {of_role.trained_parameters:,} trained parameters")
            warnings += [f"{name}: {warning}" for warning in of_role.warnings]
        return replace(facts, notes=notes, warnings=warnings)

    def clear(self, step: int | None = None) -> None:
        super().clear(step)
        if step is None:  # at the end of a step each role clears its own
            for role in self.others.values():
                role.clear()

    def leave(self) -> None:
        super().leave()
        for role in self.others.values():
            role.evaluations.taken()

    def checkpoint(self, step: int) -> WorkerFiles:
        files, numbers = super().checkpoint(step)
        tensors, roles = unpack_tensors(files[STATE]), {}
        for name, role in self.others.items():
            of_role, roles[name] = role.checkpoint(step)
            tensors |= {f"{FOLDER}/{name}/{key}": value for key, value in unpack_tensors(of_role.pop(STATE)).items()}
            files |= {f"{FOLDER}/{name}/{file}": content for file, content in of_role.items()}
        return PackedFiles(files | {STATE: pack_tensors(tensors)}), replace(numbers, roles=roles)

    def load(self, source: bytes | Path, numbers: WorkerState, step: int) -> None:
        assert isinstance(source, bytes), "full fine-tuning has no roles"
        if set(numbers.roles) != set(self.others):
            stored, present = (", ".join(sorted(names)) or "none" for names in (numbers.roles, self.others))
            raise CheckpointError(f"it has the roles {stored}, and the run {present}")
        tensors = unpack_tensors(source)
        for name, role in self.others.items():
            prefix = f"{FOLDER}/{name}/"
            parts = {k.removeprefix(prefix): tensors.pop(k) for k in [*tensors] if k.startswith(prefix)}
            role.load(pack_tensors(parts), numbers.roles[name], step)
        super().load(pack_tensors(tensors), numbers, step)


class OtherRole(PolicyWorker):
    """Policy of another role in the process of `first`: a LoRA on its base model, or on a model of its own."""

    def __init__(self, name: str, first: RoleWorker) -> None:
        config = role_config(first.config, name)
        super().__init__(config, first.rank, first.device, first.threads, first.total_updates, first.functions)
        self.name, self.first = name, first
        main = first.config.episode.own_role
        self.shares = signature(first.config, name) == signature(first.config, main)
        self.pipeline: str | None = first.config.episode.roles[name].get("pipeline")

    def load_policy(self) -> Policy:
        """Add a LoRA to the base model of the first role, or load another model."""
        policy = policy_beside(self.first.policy, self.config, self.name, self.device) if self.shares else None
        policy = policy or super().load_policy()
        if self.pipeline is not None:
            policy.pipe = as_pipeline(policy.pipe, self.pipeline, self.name)
        elif self.shares:
            policy.pipe = as_pipeline(policy.pipe, type(policy.pipe).__name__, self.name)
        if self.shares or self.pipeline is not None:
            from gerl.model.prompts import PromptCache  # imported lazily: the driver does not need transformers

            PromptCache(self.config.data.cache_gb).attach(policy.pipe)
        return policy

    def active(self) -> AbstractContextManager[None]:
        """Compute with the LoRA of this role within the block."""
        if not self.shares:
            return nullcontext()
        from gerl.model.lora import adapter_active  # imported lazily, as in `load_policy`

        return adapter_active(self.policy.denoisers.values(), self.name, trained=True)


class Rewriter(OtherRole):
    """Role with a causal language model and a LoRA on it."""

    def __init__(self, name: str, first: RoleWorker) -> None:
        super().__init__(name, first)
        self.text = first.config.episode.text_role(name)

    def setup(self, remote: bool = False) -> ModelFacts:
        with importing():  # imported lazily: the driver needs neither transformers nor peft
            from gerl.engine.hooks import count_evaluations
            from gerl.model.errors import model_errors
            from gerl.workers.actor import Actor, snapshots_of

        with model_errors("loading"):
            self.policy = self.load_policy()
        self.evaluations = count_evaluations(())
        self.algorithm = TokenGRPO(self.config)
        reduced = getattr(torch, self.config.model.reduce_dtype)
        self.actor = Actor(self.policy, self.config.actor, self.algorithm, self.total_updates, reduced=reduced)
        self.actor.say = self.notes.append
        self.snapshots = snapshots_of(self.actor)
        self.ended = 0
        count = sum(p.numel() for p in self.policy.trained.values())
        kind = type(self.model.model).__name__
        return ModelFacts(kind, list(self.policy.denoisers), count, False, self.policy.fingerprint, [], None, [], [])

    def load_policy(self) -> Policy:
        from gerl.model.language import load_language_policy  # imported lazily, as in `setup`

        return load_language_policy(self.config, self.device, self.text.temperature, self.text.tokens)

    @property
    def model(self) -> LanguageModel:
        """The language model."""
        return self.policy.pipe

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sample(self, task: RolloutTask) -> Images:
        """Sample a text per sample of `task`, which has one prompt, and store their tokens; the first ones are kept."""
        from gerl.engine import Trajectory

        start, step = time.perf_counter(), task.samples[0].step
        if self.ended:
            self.snapshots.begin(self.ended)
        seed_everything("rollout", self.config.trainer.seed, step, task.id)
        texts, tape = self.rewritten(task.samples)
        self.trajectories[task.id] = Trajectory(task, (tape,), self.policy.version, self.rank)  # type: ignore[arg-type]
        return Images(task.id, texts, time.perf_counter() - start)

    def rewritten(self, samples: Sequence[Sample]) -> tuple[list[str], TextTape]:
        """Return the texts of `samples` of one prompt, and their tape; an empty text means the prompt itself."""
        prompt = self.model.encode(samples[0].prompt.request)
        tokens, mask = self.model.sample(prompt, [sample.seed for sample in samples])
        is_original = torch.tensor([sample.index < self.text.kept for sample in samples], device=mask.device)
        mask = mask & ~is_original[:, None]
        with torch.no_grad():
            log_probs = self.model.log_probs(prompt, tokens)
        texts = self.model.decode(tokens, mask)
        rewritten = [text or sample.prompt.text for text, sample in zip(texts, samples, strict=True)]
        return rewritten, TextTape(prompt, tokens, mask, log_probs)

    def validate(self, task_id: int, samples: Sequence[Sample]) -> Images:
        """Rewrite held-out prompts with the averaged weights."""
        start, texts = time.perf_counter(), list[str]()
        with self.policy.ema.swapped_in():
            for sample in samples:
                texts += self.rewritten([replace(sample, index=self.text.kept)])[0]
        return Images(task_id, texts, time.perf_counter() - start)


def role_worker(config: Config, name: str) -> Callable[[str, RoleWorker], OtherRole]:
    """Return the class of the role `name`."""
    return Rewriter if config.episode.is_text(name) else OtherRole


def role_algorithm(config: Config, name: str) -> Algorithm:
    """Build the algorithm of the role `name` of a run with `config`."""
    settings = role_config(config, name)
    return TokenGRPO(settings) if config.episode.is_text(name) else build_algorithm(settings)


def policy_beside(first: Policy, config: Config, name: str, device: str) -> Policy:
    """Add the LoRA `name` to the denoisers of `first`, inactive; returns its policy."""
    from gerl.model.lora import ADAPTER, adapted_layers, add_lora, targets_of
    from gerl.model.policy import EMA, Policy

    model, lora = config.model, dict[str, torch.nn.Parameter]()
    for part, layers in targets_of(first.denoisers, model.lora_targets).items():
        seed = derive_seed("lora", config.trainer.seed, part, name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a LoRA per role is intended
            added = add_lora(first.denoisers[part], model.lora_rank, model.lora_alpha, layers, seed, name)
        for p in added.values():
            p.data = p.data.to(device)
        lora |= {f"{part}.{key}": p for key, p in added.items()}
    for layer in adapted_layers(first.denoisers.values()):
        layer.set_adapter([ADAPTER])
    average = EMA(lora, config.actor.ema_decay)
    return Policy(first.pipe, first.denoisers, lora, average, first.fingerprint, adapter=name)


def as_pipeline(pipe: DiffusionPipeline, name: str, role: str) -> DiffusionPipeline:
    """Return a pipeline of the diffusers class `name` with the components of `pipe`, and a scheduler of its own.

    Raises `ConfigError` if there is no such class, or `pipe` lacks a component.
    """
    import diffusers

    where, kind = f"episode.roles.{role}.pipeline={name}", getattr(diffusers, name, type(pipe))
    if kind.__name__ != name or not issubclass(kind, diffusers.DiffusionPipeline):
        raise ConfigError(f"{where}: diffusers has no such pipeline; give the name of a class")
    arguments = {}
    for argument, parameter in inspect.signature(kind.__init__).parameters.items():
        if argument in pipe.components:
            arguments[argument] = pipe.components[argument]
        elif argument in pipe.config:
            arguments[argument] = pipe.config[argument]
        elif argument != "self" and parameter.default is parameter.empty:
            raise ConfigError(f"{where}: {type(pipe).__name__} has no {argument}; set model.path for this role")
    made = kind(**arguments | {"scheduler": copy.deepcopy(pipe.scheduler)})
    made.set_progress_bar_config(disable=True)
    return made


# --- Calls to one role of the workers


def in_role(worker: RoleWorker, role: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call `function` with the policy of `role`, whose LoRA is active."""
    other = worker.others[role]
    bound = getattr(other, function.__name__, None)
    with other.active():
        return function(other, *args, **kwargs) if bound is None else bound(*args, **kwargs)


class RoleGroup(WorkerGroup[PolicyWorker]):
    """View of `whole` whose calls reach the policy of `role`."""

    def __init__(self, whole: WorkerGroup[PolicyWorker], role: str) -> None:
        self._whole, self._role = whole, role
        self.name, self.remote, self.hang_after = whole.name, whole.remote, whole.hang_after

    @property
    def numbers(self) -> list[int]:  # type: ignore[override]
        return self._whole.numbers

    @property
    def workers(self) -> list[PolicyWorker]:  # type: ignore[override]
        return self._whole.workers

    def submit(
        self, index: int, method: Callable[Concatenate[PolicyWorker, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        return self._whole.submit(index, in_role, self._role, method, *args, **kwargs)  # type: ignore[arg-type]


class RoleFleet(LocalFleet):
    """The policies of one role on the workers of `fleet`."""

    def __init__(self, fleet: LocalFleet, role: str) -> None:
        group = RoleGroup(fleet.workers, role)
        super().__init__(role_config(fleet.config, role), fleet.cluster, group, fleet.timeline)
        self.downloads = fleet.downloads
