"""Sample whole episodes with the base model and with the LoRAs of roles, as a run's validation does."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gerl.algorithms.planning import plan_validation
from gerl.cluster import Cluster
from gerl.config import Config
from gerl.config.roles import role_config
from gerl.errors import CheckpointError
from gerl.evaluate.comparison import WIDTH, ScoredRow, TurnImage
from gerl.evaluate.loras import Variant
from gerl.progress import Timeline
from gerl.protocol import Images, ModelFacts, Prompt, Scores
from gerl.rewards.manager import RewardManager
from gerl.rewards.rollouts import PendingRollout
from gerl.rewards.total import TOTAL, score_row
from gerl.run.checkpoint import load_checkpoint
from gerl.trainer.overlong import cut_prompts, sentences
from gerl.trainer.turns import Turns, written
from gerl.utils.condition_images import pictures_of
from gerl.utils.pages import thumbnail
from gerl.utils.tensors import unpack_tensors
from gerl.workers.fleet import LocalFleet
from gerl.workers.roles import FOLDER, STATE, RoleFleet, RoleWorker
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger("gerl")
AVERAGE = "ema/"  # prefix of the averaged LoRA in the state of a checkpoint
Tensors = dict[str, torch.Tensor]


class EpisodeWorker(RoleWorker):
    """Worker that validates with the averaged LoRAs of checkpoints; a role without one computes as the base model."""

    def __init__(self, config: Config, checkpoints: Sequence[Path], rank: int, device: str, threads: int) -> None:
        super().__init__(config, rank, device, threads, config.trainer.steps * config.actor.updates)
        self.checkpoints = list(checkpoints)
        self.averages: dict[Path, dict[str, Tensors]] = {}  # by checkpoint and role
        self.zero: dict[str, Tensors] = {}  # by role: a LoRA whose update is zero

    def setup(self, remote: bool = False) -> ModelFacts:
        """Load the policies and the LoRAs of all checkpoints. Raises `CheckpointError` if one does not fit."""
        facts = super().setup(remote)
        for role, worker in self.by_role.items():
            average = worker.policy.ema.average
            self.zero[role] = {n: t.cpu().clone().mul_(".lora_B." not in n) for n, t in average.items()}
        for path in self.checkpoints:
            tensors = unpack_tensors(load_checkpoint(path).read(STATE))
            self.averages[path] = {role: self.average_of(role, tensors, path) for role in self.by_role}
        return facts

    @property
    def by_role(self) -> dict[str, PolicyWorker]:
        """Return the policies of all roles by name."""
        return {self.config.episode.own_role: self, **self.others}

    def average_of(self, role: str, tensors: Tensors, path: Path) -> Tensors:
        """Return the averaged LoRA of a role from the state of a checkpoint."""
        prefix = f"{FOLDER}/{role}/{AVERAGE}" if role in self.others else AVERAGE
        wanted = self.by_role[role].policy.ema.average
        averages = {name: tensors[prefix + name] for name in wanted if prefix + name in tensors}
        if averages.keys() != wanted.keys() or any(
            averages[name].shape != value.shape for name, value in wanted.items()
        ):
            raise CheckpointError(
                f"{path} has no LoRA of the role {role} with the layers and the rank of this configuration; give the "
                "checkpoint's own with experiment=RUN/config.yaml, or evaluate it alone"
            )
        return averages

    def use(self, variant: Variant) -> None:
        """Compute with the LoRAs of `variant` from now on."""
        loras = self.zero if variant.path is None else self.averages[variant.path]
        for role, worker in self.by_role.items():
            worker.policy.ema.load((loras if role in variant.roles else self.zero)[role], 0)

    def take_notes(self) -> list[str]:
        """Return and clear the messages logged since the last call."""
        notes = [note for worker in self.by_role.values() for note in worker.notes]
        for worker in self.by_role.values():
            worker.notes.clear()
        return notes


@dataclass(frozen=True)
class Sampled:
    """Images of a turn, one per episode in the order of the prompts, with their scores."""

    scores: Scores
    images: list[Images]

    def row(self, i: int) -> tuple[dict[str, float | None], str]:
        """Return the values of image `i` by column, without scorers that do not score this turn, and why some lack."""
        values, failure = score_row(self.scores, i)
        failed = {cause.scorer for cause in self.scores.failures[i]}
        scores = {n: v for n, v in values.items() if v is not None or n == TOTAL or n.partition("/")[0] in failed}
        return scores, failure


def sample_episodes(
    config: Config, variants: Mapping[str, Variant], prompts: Sequence[Prompt], cluster: Cluster
) -> Iterator[list[ScoredRow]]:
    """Sample `validation.images_per_prompt` episodes per prompt with each variant from the same noise.

    Yields the scored rows of a few prompts at a time. Micro-batches are those of the run's validation.
    """
    turns, manager = Turns(config), RewardManager(config.reward, cluster)
    each, size = config.validation.images_per_prompt, config.validation.micro_batch_size
    least = size // math.gcd(size, each)  # fewest prompts whose images fill micro-batches
    settings = for_sampling(config)
    checkpoints = list(dict.fromkeys(v.path for v in variants.values() if v.path is not None))
    count = min(cluster.processes, len(prompts) * each)
    workers = cluster.workers(
        "worker",
        EpisodeWorker,
        count,
        lambda rank: (settings, checkpoints, rank, cluster.worker_device(rank), cluster.threads),
        gpus=cluster.gpus,
        threads=cluster.threads,
    )
    fleet = LocalFleet(settings, cluster, workers, Timeline())  # type: ignore[arg-type]
    fleet.set_up(range(count))
    for sentence in [*fleet.model.notes, *cut(fleet, turns, prompts)]:
        logger.info("%s", sentence)
    for sentence in fleet.model.warnings:
        logger.warning("%s", sentence)
    logged = set[str]()
    for start in range(0, len(prompts), least * count):
        part, rows = prompts[start : start + least * count], list[ScoredRow]()
        for name, variant in variants.items():
            workers.run(EpisodeWorker.use, variant)
            rows += rows_of(name, turns, list(episodes(turns, fleet, manager, part)))
        for note in dict.fromkeys(note for noted in workers.run(EpisodeWorker.take_notes) for note in noted):
            if note not in logged:
                logger.warning("%s", note)
                logged.add(note)
        yield rows


def for_sampling(config: Config) -> Config:
    """Return the configuration of workers that only sample, each with a model of its own."""
    return replace(
        config,
        model=config.model.for_resume(),
        rollout=replace(config.rollout, quantize="none"),
        cluster=replace(config.cluster, context=1),
        guard=replace(config.guard, action="off", judge="off"),
    )


def cut(fleet: LocalFleet, turns: Turns, prompts: Sequence[Prompt]) -> list[str]:
    """Return sentences about truncated prompts of the first turn; the texts of a rewriter are not known yet."""
    if turns.writes:
        return []
    texts = list(dict.fromkeys(prompt.request for prompt in turns.first(prompts)))
    return sentences(fleet.workers.submit(0, cut_prompts, texts, prompts[0]).result(), texts)


def episodes(turns: Turns, fleet: LocalFleet, manager: RewardManager, prompts: Sequence[Prompt]) -> Iterator[Sampled]:
    """Sample and score the episodes of `prompts` with the present LoRAs; yields their turns of images in order."""
    config = fleet.config
    roles = {name: (role_config(config, name), RoleFleet(fleet, name)) for name in config.episode.roles}
    asked, sampled = turns.first(prompts), Sampled(Scores(), [])
    if turns.writes:
        settings, writers = roles[turns.parsed[0].role]
        batches = plan_validation(settings, asked, 0)
        texts = written(writers.validate(batches), batches)
        asked = turns.rewritten([sample for batch in batches for sample in batch], texts)
    for number in turns.of_images:
        if number > turns.of_images.start:
            pixels = [image for part in sampled.images for image in part.pixels]
            asked = turns.following(number, sampled.scores, pixels, range(len(pixels)))
        settings, samplers = roles.get(turns.parsed[number].role, (config, fleet))
        batches = plan_validation(settings, asked, 0)
        dispatch, hang_after = samplers.validate(batches), samplers.samplers.hang_after
        rollout = PendingRollout(manager, batches, dispatch, hang_after, held_out=True)
        scores = Scores()
        for table in rollout.finish():
            scores.add(table)
        sampled = Sampled(scores, [pending.result() for pending in rollout.images])
        yield sampled


def rows_of(variant: str, turns: Turns, sampled: Sequence[Sampled]) -> list[ScoredRow]:
    """Return a row per episode: the scores of its last turn, and as `turn_K/NAME` those of the turns before."""
    rows, numbers = list[ScoredRow](), turns.of_images
    pixels = [[image for part in turn.images for image in part.pixels] for turn in sampled]
    for i, sample in enumerate(sampled[-1].scores.samples):
        values, failure = sampled[-1].row(i)
        failures, shown = [failure], list[TurnImage]()
        for number, turn, images in zip(numbers, sampled, pixels, strict=True):
            if number != numbers[-1]:
                earlier, failure = turn.row(i)
                values |= {f"turn_{number}/{name}": value for name, value in earlier.items()}
                failures.append(f"turn {number}: {failure}" if failure else "")
            prompt = turn.scores.samples[i].prompt
            request = "" if prompt.request == prompt.text else prompt.request
            shown.append(TurnImage(number, turns.parsed[number].role, request, thumbnail(images[i], WIDTH)))
        prompt, failure = replace(sample.prompt, turn=None), "; ".join(filter(None, failures))
        place = (prompt.id, prompt.text, sample.index, sample.seed, variant)
        rows.append(ScoredRow(*place, values, failure, shown[-1].picture, pictures_of(prompt), tuple(shown)))
    return rows
