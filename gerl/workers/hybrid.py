"""The worker: rollout and actor over one pipeline on one device, where it does both, no trajectory leaves it."""

from __future__ import annotations  # of what the driver, which only names this class, does without

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gerl.algorithms import Algorithm, Batch, Pull, batches_of, build_algorithm
from gerl.algorithms.pooling import Pooled
from gerl.cluster import own_host
from gerl.commandline.imports import importing
from gerl.config import Config
from gerl.config.noised_images import ForwardProcessConfig
from gerl.engine import Trajectory
from gerl.errors import ClusterError, ConfigError, ModelError
from gerl.model.call import check_arguments
from gerl.model.failures import model_errors
from gerl.model.paths import WEIGHTS
from gerl.objects import Function
from gerl.protocol import CutPrompts, Images, Prompt, SamplingProbe, StepEnd, UpdateStats
from gerl.run.state import WorkerState
from gerl.utils.logs import capture_logs, pass_on_logs
from gerl.utils.seeding import seed_everything
from gerl.utils.tensors import pack_tensors, unpack_tensors
from gerl.workers.collective import Meeting, Ranks
from gerl.workers.keeping import Keeping
from gerl.workers.looks import looks_of
from gerl.workers.probing import probe
from gerl.workers.rewarding import give_reward
from gerl.workers.rollout import Rollout, count_blank

if TYPE_CHECKING:
    from gerl.model.policy import Policy
    from gerl.model.shards import Part
    from gerl.protocol import ModelFacts, RolloutTask, Sample, StepFacts, StepResult
    from gerl.workers.actor import Actor
    from gerl.workers.weights import Weights
    from gerl.workers.whole import Writing

Tensors = dict[int, torch.Tensor]  # by task, or by trained step
Sets = Sequence[Sequence[int]] | None  # ids of the tasks that the ranks of a worker drew at the same time
State = tuple[dict[str, bytes], WorkerState]  # files and numbers of a checkpoint
Parts = tuple[dict[str, "Part"], WorkerState]  # what this process has of one, where weights are trained


def repeated(task_id: int) -> int:
    """The id under which a rank keeps its repetition of another rank's task."""
    return ~task_id


def peak_memory(device: str | torch.device) -> float | None:
    """The most GPU memory in GB that torch has reserved on `device` since the last call; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    peak = torch.cuda.max_memory_reserved(device) / 1e9
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class HybridWorker:
    """A process of the workers that share the images of a step, and hold the same LoRA and optimizer.

    With cluster.layout=split some of them are only asked to draw, and the others to train. A worker may have several,
    its ranks, each with a part of the frozen weights (model.shard), and where weights are trained themselves, of these,
    or of the tokens of a call (cluster.context). They gather these from each other while they draw and train, so all of
    them have to call the model equally often. Ranks that share tokens draw and train the same, of which only what the
    first says counts; of the gradient each has a part.
    """

    def __init__(
        self, config: Config, rank: int, device: str, threads: int, total_updates: int,
        functions: Mapping[str, Function] | None = None,
    ) -> None:  # fmt: skip
        """`functions`: those of the driver's program that are scorers here, by name, where they are differentiated."""
        self.config, self.rank, self.device, self.threads = config, rank, device, threads
        self.functions = functions or {}
        self.total_updates = total_updates
        self.drawn: dict[int, Trajectory] = {}  # by task id
        self.kept: tuple[int, Parts] | None = None  # the last finished step and its state where weights are trained
        self.ended: int | None = None  # the trainer step that was finished last; None: nothing is loaded
        self.blank: Counter[int] = Counter()  # by step: images that have a single colour
        self.notes: list[str] = []  # of this step, for the run's log
        self.meeting = Meeting()
        self.ranks: Ranks | None = None  # where they are in lockstep
        self.leads = rank % config.cluster.context == 0  # the ranks that share tokens
        self.policy: Policy
        self.rollout: Rollout
        self.actor: Actor
        self.keeping: Keeping  # of that step's state otherwise
        self.algorithm: Algorithm
        self.writing: Writing

    def check(self, joined: bool = False) -> None:
        """Find out what can be known of the model before its weights are loaded, and import what loads it.

        On one machine the first process does for all. On a cluster that is `joined` each process looks where it is,
        which its error names. Raises `ModelError` or `ConfigError`.
        """
        with importing():
            from gerl.workers.checks import check_start  # in here: it takes seconds, and the driver does without
        if self.rank and not joined:
            return
        try:
            with importing():
                check_start(self.config, self.device)
        except (ModelError, ConfigError) as error:
            if not joined:
                raise
            raise type(error)(f"{error} (on {own_host()})") from error

    def setup(self, remote: bool = False) -> ModelFacts:
        """Load the pipeline and everything that works on it.

        `remote`: nobody reads the log of this process, which goes to the run's from here on.
        """
        with importing():  # in here: the driver does without diffusers and what comes with it
            from torch.distributed.tensor import DTensor

            from gerl.model.libraries import quiet_libraries
            from gerl.workers.actor import Actor
            from gerl.workers.facts import facts_of
            from gerl.workers.loading import loaded_policy
            from gerl.workers.optimizers import check_optimizer

        torch.set_num_threads(self.threads)
        quiet_libraries()
        check_optimizer(self.config.actor, self.device)
        seed_everything("worker", self.config.trainer.seed)
        model = self.config.model
        with capture_logs("gerl.model", logging.INFO) as notes, model_errors("loading"):
            self.policy = loaded_policy(self.config, self.device, self.ranks)
        algorithm = self.config.algorithm
        guidance = algorithm.reference_guidance if isinstance(algorithm, ForwardProcessConfig) else None
        check_arguments(type(self.policy.pipe), self.config.sampling, guidance_scale=guidance)
        self.rollout = Rollout(self.policy, self.config.sampling, self.config.validation, lockstep=self.config.lockstep)
        self.rollout.ways.divides = self.ranks is None  # ranks in lockstep make the same calls
        self.rollout.ways.say = self.notes.append
        self.algorithm = build_algorithm(self.config)
        give_reward(self.algorithm, self.device, self.functions)
        first = next(iter(self.policy.trained.values()))
        group = first.device_mesh.get_group() if isinstance(first, DTensor) else None
        settings = replace(self.config.actor, lr=self.config.actor.rate(model.train))
        staleness = self.config.trainer.staleness
        self.actor = Actor(self.policy, settings, self.algorithm, self.total_updates, self.ranks, group, staleness)
        self.actor.say = self.notes.append
        self.keeping, self.ended = Keeping(self.actor), 0
        if remote:
            pass_on_logs("gerl", logging.INFO, self.notes.append)
        return facts_of(self.policy, self.config, notes)

    def address(self) -> str:
        """An address at which the workers can meet for their all-reduce."""
        return self.meeting.open()

    def join(self, address: str, rank: int, world_size: int) -> None:
        """Meet the other processes, as number `rank` of them, before the model is loaded; a collective call."""
        self.meeting.join(address, rank, world_size, self.device)
        if self.config.lockstep:
            self.ranks = Ranks(self.device, self.config.lockstep_ranks, self.config.cluster.context)

    def leave(self) -> None:
        """Give up what was begun of a step, and the meeting with the others."""
        self.meeting.leave()
        if hasattr(self, "actor"):
            self.forget()

    def generate(self, task: RolloutTask) -> Images:
        """Draw a micro-batch and keep its trajectory."""
        start = time.perf_counter()
        if self.ended and not self.policy.whole:
            self.keeping.begin(self.ended)  # all have finished that step, or nothing new was drawn
        seed_everything("rollout", self.config.trainer.seed, task.samples[0].step, task.id)
        pixels, self.drawn[task.id] = self.rollout.generate(task, self.algorithm, self.rank)
        self.blank[task.samples[0].step] += count_blank(pixels)
        return Images(task.id, pixels, time.perf_counter() - start)

    def repeat(self, task: RolloutTask, kept: int) -> None:
        """Draw a micro-batch of another rank, whose images do not count; `kept`: the id of its trajectory here."""
        seed_everything("rollout", self.config.trainer.seed, task.samples[0].step, task.id)
        self.drawn[kept] = self.rollout.generate(task, self.algorithm, self.rank)[1]

    def hand_over(self, task_id: int) -> Trajectory:
        """The trajectory of a task that this worker drew, for `take` of one that trains on it."""
        return self.drawn.pop(task_id)

    def take(self, trajectory: Trajectory, kept: int) -> None:
        """Keep a trajectory that another worker drew, under the id `kept`."""
        self.drawn[kept] = trajectory

    def weights(self, earlier: bool) -> Weights:
        """The weights of this worker, which trains, for `follow` of those that only draw.

        `earlier`: with those of earlier steps, which are needed after a run was resumed.
        """
        from gerl.workers.weights import weights_of  # in here, as in `setup`

        return weights_of(self.policy, earlier)

    def follow(self, weights: Weights) -> None:
        """Draw with the `weights` of a worker that trains from here on."""
        from gerl.workers.weights import take_weights  # in here, as in `setup`

        take_weights(self.policy, weights)

    def validate(self, task_id: int, samples: Sequence[Sample]) -> Images:
        """Draw held-out prompts with the averaged LoRA."""
        start, pixels = time.perf_counter(), self.rollout.validate(samples)
        return Images(task_id, pixels, time.perf_counter() - start, looks_of(pixels))

    def pool(self, credit: Tensors, sets: Sets = None, pull: Pull | None = None) -> Pooled:
        """The part of this worker's tasks among those of `credit` in the losses of the others of their groups."""
        self.algorithm.weigh(pull)
        batches = self._batches(self._own(credit, sets))
        with model_errors("update"):
            found = self.actor.fitting(batches, lambda: self.actor.pool(batches))
        return found if self.leads else {}

    def accumulate(
        self, credit: Tensors, num_pairs: int, pooled: Pooled | None = None, sets: Sets = None, pull: Pull | None = None
    ) -> UpdateStats:
        """Add the gradient of this worker's tasks among those of `credit`, task id -> `[B, T]`.

        `pooled`: the sums over groups from all workers' `pool`, where the algorithm `pools`. Of the update's first task
        with something to learn, whichever worker has it, the gradient is measured by steps. `sets`: in lockstep.
        """
        self.algorithm.weigh(pull)
        first = next((i for i, v in credit.items() if v.nan_to_num().any()), None)
        own = {i: self._batches({i: v}, pooled, pull) for i, v in self._own(credit, sets).items()}

        def work() -> UpdateStats:
            return sum((self.actor.accumulate(b, num_pairs, by_step=i == first) for i, b in own.items()), UpdateStats())

        with model_errors("update"):
            stats = self.actor.fitting([batch for batches in own.values() for batch in batches], work)
        return stats if self.leads else UpdateStats()

    def step_gradients(
        self, credit: Tensors, num_pairs: int, pooled: Pooled | None = None, sets: Sets = None
    ) -> Tensors:
        """The gradient that `accumulate` would add, by trained step (or noise level), each one vector on the CPU."""
        with model_errors("update"):
            return self.actor.step_gradients(self._batches(self._own(credit, sets), pooled), num_pairs)

    def _own(self, credit: Tensors, sets: Sets) -> Tensors:
        """The credit of what this process has drawn; in lockstep one task of each set, NaN where it has no credit."""
        if sets is None:
            return {i: values for i, values in credit.items() if i in self.drawn}
        own = [i for members in sets for i in (*members, repeated(members[0])) if i in self.drawn]
        nothing = torch.full((1, self.config.sampling.num_inference_steps), torch.nan)
        return {i: credit.get(i, nothing.expand(len(self.drawn[i].task.samples), -1)) for i in own}

    def _batches(self, credit: Tensors, pooled: Pooled | None = None, pull: Pull | None = None) -> list[Batch]:
        own = [(self.drawn[i], values, pull.of(i) if pull else None) for i, values in credit.items() if i in self.drawn]
        return [batch for drawn, values, gate in own for batch in batches_of(drawn, values, pooled, gate)]

    def step_facts(self) -> list[StepFacts]:
        """How each trained step of what this worker has drawn counts in the loss, in order."""
        found: dict[int, StepFacts] = {}
        for drawn in self.drawn.values():
            for segment, tape in zip(drawn.task.segments, drawn.tapes, strict=True):
                if segment.trained:
                    found |= {facts.step: facts for facts in self.algorithm.step_facts(tape, segment.trained)}
        return [found[k] for k in sorted(found)]

    def kl_to_base(self, task_id: int) -> list[float]:
        """KL `[B]` to the base model of the samples of a task that this worker drew."""
        drawn = self.drawn[task_id]
        batches = batches_of(drawn, torch.zeros(len(drawn.task.samples), self.config.sampling.num_inference_steps))
        with model_errors("update"):
            return [float(v) for batch in batches for v in self.algorithm.kl_to_base(self.policy, batch)]

    def cut_prompts(self, prompts: Sequence[str], like: Prompt) -> CutPrompts:
        """Which of `prompts` the pipeline's tokenizers cut; `like` is one of them."""
        from gerl.workers.loading import encoded_folder  # in here, as in `setup`

        with model_errors("rollout"):
            return self.rollout.cut_prompts(prompts, like, encoded_folder(self.config, self.device))

    def probe(self, task: RolloutTask) -> SamplingProbe:
        """Measure what a policy gradient depends on: draws a micro-batch and replays half of it."""
        dtype = next(iter(self.policy.denoisers.values())).dtype
        return probe(self.policy.pipe, self.rollout.generate(task, self.algorithm)[1], self.algorithm, dtype)

    def reduce_gradient(self) -> None:
        """Sum the gradients of all workers, a LoRA's by one flat all-reduce; a collective call.

        What the ranks of a worker have divided among them is the sum of theirs already.
        """
        if self.policy.whole:
            if self.ranks is None or self.ranks.peers.size() > 1:
                self.actor.sum_gradients(None if self.ranks is None else self.ranks.peers)
            return
        flat = self.actor.flat_gradient()
        dist.all_reduce(flat)
        self.actor.set_flat_gradient(flat)

    def flat_gradient(self) -> torch.Tensor:
        """This worker's gradient as one vector on the CPU, where those of several devices meet."""
        return self.actor.flat_gradient().cpu()

    def set_flat_gradient(self, flat: torch.Tensor) -> None:
        """Replace this worker's gradient."""
        self.actor.set_flat_gradient(flat)

    def step(self, finished: int, together: bool = False, last: bool = False, resets: bool = False) -> StepResult:
        """Take an optimizer step with the accumulated gradient; `finished`: the trainer step that was finished last.

        `together`: with the sum of all workers' gradients, a collective call. `last`: and `finish_step`.
        """
        self.keep(finished)
        if together:
            self.reduce_gradient()
        return replace(self.actor.step(), end=self.finish_step(finished + 1, resets) if last else None)

    def finish_step(self, step: int, resets: bool = False) -> StepEnd:
        """End of trainer step `step`: the old policies follow, trajectories go; `resets`: the reference follows."""
        self.keep(step - 1)
        self.actor.finish_step(step, resets)
        self.ended = step
        return self.end_drawing(step)

    def end_drawing(self, step: int) -> StepEnd:
        """The end of trainer step `step` of a worker that only draws."""
        blank, notes = self.blank[step], self.notes.copy()
        self.forget(step)
        self.notes.clear()
        return StepEnd(blank, notes, peak_memory(self.device))

    def forget(self, step: int | None = None) -> None:
        """Drop the trajectories and gradients of a finished `step`, or of all that were begun."""
        for i in [i for i, drawn in self.drawn.items() if step is None or drawn.task.samples[0].step <= step]:
            del self.drawn[i]
        self.blank = Counter({k: count for k, count in self.blank.items() if step is not None and k > step})
        self.actor.optimizer.zero_grad(set_to_none=True)

    def keep(self, finished: int) -> None:
        """Keep the state of trainer step `finished` while the next one changes it, for a run that ends meanwhile."""
        if self.policy.whole:
            from gerl.workers.whole import parts_of  # in here, as in `setup`

            if self.kept is None or self.kept[0] != finished:
                parts, numbers = parts_of(self.actor)
                self.kept = finished, ({name: part.copy() for name, part in parts.items()}, numbers)
        else:
            self.keeping.kept(finished)  # files are made of it when somebody asks

    def finished(self, step: int) -> State:
        """The checkpoint of trainer step `step`, the last one that all workers finished; the same bytes on each.

        Files and numbers: the exact state, and the averaged LoRA for plain diffusers. Raises as `check_has`.
        """
        self.check_has(step)
        tensors, numbers = self.keeping.kept(step)  # if it is not kept, nothing has changed since
        average = {name: tensors[f"ema/{name}"] for name in self.policy.trained}
        return {"state.safetensors": pack_tensors(tensors), f"lora/{WEIGHTS}": self.policy.lora_file(average)}, numbers

    def check_has(self, step: int) -> None:
        """Raise `ClusterError` unless the state after trainer step `step` is here."""
        if self.ended is None or step not in (self.ended, self.keeping.step, None if not self.kept else self.kept[0]):
            raise ClusterError(f"rank {self.rank} was restarted and does not have the state of step {step}")

    def hold(self, step: int) -> WorkerState:
        """Keep what is here of the checkpoint of trainer step `step`, to be written beside the training.

        Returns its numbers. The calls that follow are `start_state` of all that write, `start_denoisers` of the first
        of them, and `written` until each has ended. Raises as `check_has`.
        """
        from gerl.workers.whole import Writing  # in here, as in `setup`

        self.check_has(step)
        self.keep(step)
        assert self.kept is not None
        parts, numbers = self.kept[1]
        self.writing = Writing(self.policy, parts)
        return numbers

    def start_state(self, folder: Path, number: int) -> None:
        """Begin to write what is held into the `folder` of a checkpoint, as process `number` of those that do."""
        self.writing.start_state(folder, number)

    def start_denoisers(self, folder: Path) -> None:
        """Begin to write the averaged denoisers into `folder`, where all have written what they hold."""
        self.writing.start_denoisers(folder)

    def written(self) -> bool:
        """Whether what was begun is written; raises what it raised."""
        return self.writing.written()

    def load_state(self, folder: Path, numbers: WorkerState, step: int) -> None:
        """Continue from a checkpoint of trained weights; raises `CheckpointError` if it does not fit."""
        from gerl.workers.whole import load_state  # in here, as in `setup`

        self.kept = self.ended = None
        load_state(self.actor, folder, numbers)
        self.ended = step

    def load_checkpoint(self, state: bytes, numbers: WorkerState, step: int) -> None:
        """Continue from a checkpoint of trainer step `step`; raises `CheckpointError` if it does not fit."""
        self._load(unpack_tensors(state), numbers, step)

    def _load(self, tensors: dict[str, torch.Tensor], numbers: WorkerState, step: int) -> None:
        self.ended, self.keeping = None, Keeping(self.actor)
        self.actor.load_state(tensors, numbers)
        self.ended = step
