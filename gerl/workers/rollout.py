"""The rollout of a worker: generates images and trajectories from prompts."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from gerl.algorithms import Algorithm
from gerl.config import SamplingConfig, ValidationConfig
from gerl.engine import FeatureCache, RequiredTensors, Tape, Trajectory, compact, record_batch_probe
from gerl.engine.branch import branch_plan
from gerl.engine.denoising_error import finished_latents
from gerl.engine.hooks import noise_from
from gerl.engine.latents import record_decoding
from gerl.engine.record import InitialNoise, SamplingPlan, fixed_generators, record_plan
from gerl.engine.rows import select_call
from gerl.engine.transitions import check_scheduler
from gerl.errors import ModelError, ReplayError
from gerl.model.errors import PIPELINE_ERRORS, CallRefused, is_full, model_errors, raise_known, raise_refusal, release
from gerl.model.prompts import check_sigmas, pipeline_call, training_sigmas
from gerl.protocol import CutPrompts, Prompt, RolloutTask, Sample, Segment
from gerl.utils.condition_images import picture_arguments, read_picture
from gerl.utils.seeding import sample_generators

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from diffusers.utils import BaseOutput
    from PIL.Image import Image

    from gerl.model.policy import Policy

logger = logging.getLogger(__name__)
T = TypeVar("T")

# --- Call formats: a list of prompts, one prompt per call, or one prompt as a plain string.
#
# Pipelines differ, and show it only by an error: the formats are tried in this order on the first call. If a batch does
# not fit into memory, later calls have half as many samples.

# errors of pipelines for unsupported arguments, also in gerl's calls on their behalf
REFUSALS = (CallRefused, ValueError, RuntimeError, IndexError, TypeError, AttributeError)


@dataclass(frozen=True)
class CallFormat:
    """Format of a pipeline's samples: `CallFormat(most=1, text=True)` passes one per call, its prompt as a string."""

    most: int | None = None  # samples per call; None: all
    text: bool = False  # prompt as a string, for a pipeline that takes no list

    def of(self, count: int) -> int:
        """Return the number of samples per call, of `count` in total."""
        return min(self.most or count, count)

    def arguments(self, call: Mapping[str, object]) -> dict[str, object]:
        """Return the keyword arguments `call`, with prompts as lists, in this format."""
        if not self.text:
            return dict(call)
        return {
            name: value[0] if "prompt" in name and isinstance(value, list) and len(value) == 1 else value
            for name, value in call.items()
        }


TOGETHER = CallFormat()
FORMATS = (TOGETHER, CallFormat(1), CallFormat(1, text=True))
Smaller = Callable[[int], int]


def half(size: int) -> int:
    """Return half of `size`, rounded up."""
    return -(-size // 2)


@dataclass
class CallFormatFinder:
    """Search for the accepted call format and a batch size that fits into memory, by purpose: guidance may differ."""

    pipe: DiffusionPipeline
    say: Callable[[str], None] = logger.warning  # reports that a batch was split because memory is full
    divides: bool = True  # whether batches may be split
    formats: dict[str, CallFormat] = field(default_factory=dict)

    def attempt(self, purpose: str, count: int, sample: Callable[[CallFormat], T], smaller: Smaller | None = half) -> T:
        """Call `sample` in the first accepted format, or raise the first error; `smaller`: batch size after an OOM."""
        while True:
            try:
                return self._attempt(purpose, count, sample)
            except (MemoryError, RuntimeError) as error:
                form = self.formats.get(purpose, TOGETHER)
                size = form.of(count)
                if not (is_full(error) and self.divides and smaller is not None and size > 1):
                    raise
                release(error)
            self.formats[purpose] = replace(form, most=smaller(size))
            self.say(
                f"out of memory in the {purpose} of {size} images: continuing with "
                f"{purpose}.micro_batch_size={smaller(size)}; set it to skip this search"
            )

    def _attempt(self, purpose: str, count: int, sample: Callable[[CallFormat], T]) -> T:
        if purpose in self.formats:
            return sample(self.formats[purpose])
        refused: Exception | None = None
        for form in FORMATS if count > 1 else (TOGETHER, FORMATS[-1]):
            try:
                result = sample(form)
            except REFUSALS as error:
                if is_full(error):
                    raise
                if refused is not None and str(error) != str(refused):
                    logger.info("%s, one prompt per call: %s", type(self.pipe).__name__, error)
                refused = refused or error
                continue
            if count > 1 or form.text:  # success with a single sample proves nothing for several
                self.formats[purpose] = form
            if form.most is not None:
                logger.info("%s takes one prompt per call: samples are generated one by one", type(self.pipe).__name__)
            return result
        assert refused is not None
        raise refused


def divided(task: RolloutTask, most: int | None) -> RolloutTask:
    """Split the segments of `task` to at most `most` rows each, in the same order, those of a tree to single rows."""
    if most is None or all(len(segment.seeds) <= most for segment in task.segments):
        return task
    if len(task.segments) == 1:
        (whole,) = task.segments
        parts = [slice(i, i + most) for i in range(0, len(whole.seeds), most)]
        divided_segments = tuple(replace(whole, seeds=whole.seeds[part], leaves=whole.leaves[part]) for part in parts)
        return replace(task, segments=divided_segments)
    segments: list[Segment] = []
    places: list[list[int]] = []  # by segment of `task`: the new segment and row of each of its rows
    for segment in task.segments:
        places.append([len(segments) + r for r in range(len(segment.seeds))])
        for r, (seed, leaf) in enumerate(zip(segment.seeds, segment.leaves, strict=True)):
            alone = replace(segment, seeds=(seed,), leaves=(leaf,))
            if segment.parent is not None:
                alone = replace(alone, parent=places[segment.parent][segment.rows[r]], rows=(0,))
            segments.append(alone)
    return replace(task, segments=tuple(segments))


# --- Rollout: images and trajectories from prompts


def shared_prefixes(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Find samples with the same prompt and initial noise: they share a prefix, which is computed once.

    Returns the first sample of each distinct prefix, and for each sample the index of its prefix among these. Samples
    with individual initial noise (`init_seed` is None) share nothing.
    """
    kinds: dict[tuple[int, int | None], int] = {}
    first: list[int] = []
    rows: list[int] = []
    for i, sample in enumerate(samples):
        kind = (sample.prompt.id, sample.init_seed) if sample.init_seed is not None else (-1, i)
        if kind not in kinds:
            kinds[kind] = len(first)
            first.append(i)
        rows.append(kinds[kind])
    return first, rows


@dataclass(frozen=True)
class FinishedCall:
    """Samples of a call of the pipeline, their latents after its last step `[B, ...]`, and its number of steps.

    `generators()` returns those of the call anew; `again(run, samples)` calls `run` with the arguments of this call for
    other `samples`. The latents are None if the pipeline's own scheduler has taken no step.
    """

    samples: Sequence[Sample]
    latents: torch.Tensor | None
    steps: int
    generators: Callable[[], list[torch.Generator]]
    again: Callable[[Callable[[dict[str, object]], torch.Tensor], Sequence[Sample]], torch.Tensor]


class Rollout:
    """Sampler; `shares`: see `shared_prefixes`; `lockstep`: model calls must not depend on what samples share."""

    def __init__(
        self,
        policy: Policy,
        sampling: SamplingConfig,
        validation: ValidationConfig,
        shares: bool = True,
        lockstep: bool = False,
    ) -> None:
        self.policy, self.sampling, self.validation = policy, sampling, validation
        cache = FeatureCache(sampling.cache, sampling.cache_threshold, sampling.cache_interval)
        self.plan = SamplingPlan(sampling.kernel, sampling.noise_level, sampling.solver, sampling.compression, cache)
        check_scheduler(policy.pipe.scheduler, self.plan.kernel, self.plan.noise_level, self.plan.solver)
        check_sigmas(policy.pipe.scheduler, sampling)
        self.sigmas = training_sigmas(sampling)
        self._picture_each = False
        self._warned: set[str] = set()  # differences between request and output that are logged
        self.format = CallFormatFinder(policy.pipe)
        # a call's structure is the same in every rollout: probed once for calls of several samples, once for one
        self._probes: dict[bool, Tape] = {}
        self.branched_at: frozenset[int] = frozenset()  # steps of the current segment from which others branch
        self.scores_latents = False  # whether the finished latents of trajectories are scored
        self.shares, self.lockstep = shares and sampling.init_noise_spread == 0, lockstep

    def generate(self, task: RolloutTask, algorithm: Algorithm, owner: int = 0) -> tuple[np.ndarray, Trajectory]:
        """Sample `task`: images `[B, H, W, 3]` uint8 and their trajectory; `owner`: rank of this worker."""
        algorithm = algorithm.of(task.samples)
        after, segments = algorithm.needs.rollout_old_after, len(task.segments)
        old = after is not None and task.samples[0].step > after
        try:
            pixels, tapes, task = self.sample(task, old, not algorithm.needs_whole_batches)
        except (MemoryError, RuntimeError) as error:
            raise_known(error, "rollout", len(task.samples))
            raise
        if len(task.segments) > segments:
            if algorithm.needs.sampled_images(algorithm.config.rollout.n) > 1:
                raise ModelError(
                    f"{type(self.policy.pipe).__name__} takes one prompt per call, but "
                    f"algorithm.name={algorithm.settings.name} compares images of a prompt in its update: choose "
                    "another algorithm"
                )
            if algorithm.whole_groups and not algorithm.pools:
                raise ModelError(
                    f"{type(self.policy.pipe).__name__} takes one prompt per call, but "
                    f"algorithm.name={algorithm.settings.name} compares the images of a group: use "
                    "actor.micro_batch_size=1, which determines what they share in a first pass"
                )
        for segment, tape in zip(task.segments, tapes, strict=True):
            if segment.stop is None and max(segment.trained, default=0) >= (taken := len(tape.steps)):
                raise ModelError(
                    f"{type(self.policy.pipe).__name__} takes {taken} denoising steps of "
                    f"sampling.num_inference_steps={self.sampling.num_inference_steps}, as when starting from an image "
                    f"with strength < 1: end sampling.window_range at {taken} or before"
                )
        # compacted after all sampling, since branches start from outputs that no replay reads
        required = [required_tensors(algorithm, segment) for segment in task.segments]
        if self.scores_latents:
            required = [replace(tensors, finished=True) for tensors in required]
        compacted = tuple(compact(tape, tensors) for tape, tensors in zip(tapes, required, strict=True))
        version = self.policy.earlier[task.lag].updates if task.lag else self.policy.version
        return pixels, Trajectory(task, compacted, version, owner)

    def finished_calls(self, trajectory: Trajectory) -> list[FinishedCall]:
        """Return the sampled images of `trajectory`, whose tapes have kept their finished latents."""
        calls, form = list[FinishedCall](), self.format.formats.get("rollout", TOGETHER)
        for segment, tape in zip(trajectory.task.segments, trajectory.tapes, strict=True):
            if segment.stop is None:
                samples = [trajectory.task.samples[leaf] for leaf in segment.leaves]
                again = partial(self.called, form=form, sigmas=self.sigmas)
                fixed = partial(fixed_generators, len(samples))
                calls.append(FinishedCall(samples, tape.steps[-1].x_next, len(tape.steps), fixed, again))
        return calls

    def sample(
        self, task: RolloutTask, old: bool = False, divisible: bool = True
    ) -> tuple[np.ndarray, list[Tape], RolloutTask]:
        """Sample `task` (`old` policy, `divisible` if memory is full): images, a tape per segment, actual task."""

        def sample_as(form: CallFormat) -> tuple[np.ndarray, list[Tape], RolloutTask]:
            tapes: list[Tape] = []
            images: list[np.ndarray] = []
            parts = divided(task, form.most)
            for number, segment in enumerate(parts.segments):
                self.branched_at = frozenset(s.start for s in parts.segments if s.parent == number)
                output, tape = self._sample_segment(task, segment, tapes, form)
                tapes.append(tape)
                if segment.stop is None:
                    images.append(to_uint8(output))
                    self._compare_output(images[-1], len(segment.leaves))
                    self._compare_steps(len(tape.steps))
            return np.concatenate(images), tapes, parts

        most = max(len(segment.seeds) for segment in task.segments)
        smaller = half if len(task.segments) == 1 else lambda size: 1  # trees are divided into single rows
        with self.policy.as_sampler(old, task.lag):
            return self.format.attempt("rollout", most, sample_as, smaller if divisible else None)

    def _sample_segment(
        self, task: RolloutTask, segment: Segment, tapes: list[Tape], form: CallFormat
    ) -> tuple[BaseOutput | None, Tape]:
        if segment.parent is not None:
            return self._branch(tapes[segment.parent], segment.start, segment.rows, segment)
        samples = [task.samples[leaf] for leaf in segment.leaves]
        if samples[0].prompt.dataset_images:
            return self.called(partial(self._read, samples), samples, form, sigmas=self.sigmas)
        if self.lockstep and len(samples) > 1 and not self._probes:  # which of the two is needed depends on the samples

            def probes(call: dict[str, object]) -> dict[bool, Tape]:
                pipe = self.policy.pipe
                return {
                    several: record_batch_probe(pipe, call, [0] if several else [0, 0]) for several in (True, False)
                }

            self._probes = self.called(probes, samples, form, sigmas=self.sigmas)
        first, rows = shared_prefixes(samples)
        if not (self.shares and segment.window and len(first) < len(samples)):
            return self._record(samples, segment, form)
        fork = min(segment.window)
        common = replace(segment, seeds=tuple(segment.seeds[i] for i in first), window=(), stop=fork)
        tape = self._record([samples[i] for i in first], common, form)[1]
        try:
            return self._branch(tape, fork, rows, segment)
        except ReplayError as error:
            self.shares = False
            logger.info("images of a group do not share their first denoising steps: %s", error)
            return self._record(samples, segment, form)

    def _record(self, samples: Sequence[Sample], segment: Segment, form: CallFormat) -> tuple[BaseOutput | None, Tape]:
        """Record `segment`, with rows `samples`, from the prompts on."""
        seeds = [s.init_seed for s in samples if s.init_seed is not None]
        spread = self.sampling.init_noise_spread if seeds else 0.0
        several = len(samples) > 1

        def record(call: dict[str, object]) -> tuple[BaseOutput | None, Tape]:
            initial = InitialNoise(sample_generators(seeds) if seeds else None, spread)
            generators, probe = sample_generators(list(segment.seeds)), self._probes.get(several, True)
            return record_plan(self.policy.pipe, call, self._plan(segment), generators, probe, initial)

        output, tape = self.called(record, samples, form, sigmas=self.sigmas)
        if tape.probe is not None:
            self._probes[several] = tape.probe
        return output, tape

    def _read(self, samples: Sequence[Sample], call: dict[str, object]) -> tuple[BaseOutput, Tape]:
        """Read dataset images, and record a tape that ends with their latents."""
        paths = [sample.dataset_image.path for sample in samples if sample.dataset_image is not None]
        return self.encoded(call, [(path, read_picture(path)) for path in paths])

    def encoded(self, call: dict[str, object], images: Sequence[tuple[str, Image]]) -> tuple[BaseOutput, Tape]:
        """Encode named images, one per sample of `call`, and record a tape that ends with their latents."""
        from diffusers import ImagePipelineOutput  # imported lazily: the driver of a run does not need it

        pipe, several = self.policy.pipe, len(images) > 1
        clean, pixels = self.policy.images.of(pipe, select_call(call, [0]), images)
        tape = record_decoding(pipe, call)
        tape.steps[-1] = replace(tape.steps[-1], x_next=clean)
        if several:
            tape.probe = self._probes.setdefault(True, self._probes.get(True) or record_batch_probe(pipe, call))
        return ImagePipelineOutput(images=pixels / 255), tape

    def _branch(self, tape: Tape, step: int, rows: Sequence[int], segment: Segment) -> tuple[BaseOutput | None, Tape]:
        """Record `segment`, whose rows branch off at step `step` from the samples `rows` of `tape`."""
        generators = sample_generators(list(segment.seeds))
        planned = branch_plan(self.policy.pipe, tape, step, rows, self._plan(segment), generators)
        if tape.probe is not None:
            self._probes[tape.batch_size > 1] = tape.probe
        return planned

    def _plan(self, segment: Segment) -> SamplingPlan:
        """Return how the denoising steps of `segment` are taken."""
        cache, window, noise = self.plan.cache, frozenset(segment.window), dict(segment.noise)
        if cache.name != "none":
            cache = replace(cache, exact=self.branched_at)
        return replace(self.plan, cache=cache, window=window, stop=segment.stop, noise_at=noise)

    def validate(self, samples: Sequence[Sample]) -> tuple[np.ndarray, list[FinishedCall]]:
        """Sample with the plain pipeline (ODE) and the averaged weights: images `[B, H, W, 3]` uint8, and latents."""
        names = ("height", "width", "num_inference_steps", "guidance_scale")
        overrides = {name: getattr(self.validation, name) for name in names}

        def sample_as(form: CallFormat) -> tuple[np.ndarray, list[FinishedCall]]:
            calls: list[FinishedCall] = []

            def again(run: Callable[[dict[str, object]], T], others: Sequence[Sample]) -> T:
                return self.called(run, others, form, "validation", **overrides)

            def images(part: Sequence[Sample]) -> np.ndarray:
                # seeds as in the report, so that plain diffusers samples the same images
                generators = seeded(part)
                noise = {"generator": generators[0] if form.text else generators}

                def run(call: dict[str, object]) -> np.ndarray:
                    pipe = self.policy.pipe
                    with noise_from(pipe.scheduler, noise["generator"]), finished_latents(pipe) as finished:
                        pixels = to_uint8(pipe(**call | noise))
                    self._compare_output(pixels, len(part), self.validation.height, self.validation.width)
                    calls.append(FinishedCall(part, finished.latents, finished.steps, partial(seeded, part), again))
                    return pixels

                return again(run, part)

            size = form.of(len(samples))
            return np.concatenate([images(samples[i : i + size]) for i in range(0, len(samples), size)]), calls

        with self.policy.ema.swapped_in(), model_errors("validation", len(samples)):
            return self.format.attempt("validation", len(samples), sample_as)

    def _compare_output(
        self, images: np.ndarray, count: int, height: int | None = None, width: int | None = None
    ) -> None:
        """Compare images `[B, (F,) H, W, 3]` with what was requested; raises `ModelError` for another number of them.

        Warns once of another size or number of frames. `height`, `width`: None means the rollout's.
        """
        kind = type(self.policy.pipe).__name__
        if len(images) != count:
            raise ModelError(
                f"{kind} returned {len(images)} images for {count} prompts: remove the argument from sampling.call "
                "that asks for several images per prompt, and set rollout.n"
            )
        frames, taken = self.sampling.call.get("num_frames"), images.shape[1] if images.ndim == 5 else 1
        if frames not in (None, taken):
            self._warn_once(f"sampling.call.num_frames={frames}, but {kind} samples {taken}: set it to {taken}")
        requested = height or self.sampling.height, width or self.sampling.width
        size = images.shape[-3], images.shape[-2]
        if any(r not in (None, s) for r, s in zip(requested, size, strict=True)):
            tall, wide = ("its default" if r is None else r for r in requested)
            self._warn_once(
                f"images of {tall} x {wide} pixels (height x width) were requested, but {kind} samples {size[0]} x "
                f"{size[1]}: set sampling.height to {size[0]} and sampling.width to {size[1]}, or their counterparts "
                "in validation, so that the run's record is correct"
            )

    def _compare_steps(self, taken: int) -> None:
        """Warn once if the pipeline took more denoising steps than requested."""
        steps = self.sampling.num_inference_steps
        if taken > steps:
            self._warn_once(
                f"sampling.num_inference_steps={steps}, but {type(self.policy.pipe).__name__} takes {taken} denoising "
                f"steps: set it to {taken}, so that the run's record is correct"
            )

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            logger.warning("%s", sentence)

    def cut_prompts(self, prompts: Sequence[str], like: Prompt, folder: Path | None) -> CutPrompts:
        """Return which `prompts` tokenizers truncate. `like`: with the images that a call needs. `folder`: a cache."""
        # imported lazily: the driver of a run does not need transformers
        from gerl.model.prompts import PROBE, Reading, cut_prompts, keep_readings, kept_readings, readings

        stored = kept_readings(folder)
        if stored is None:
            sample = Sample(replace(like, text=PROBE, dataset_images=()), 0, 0, 0)

            def read(form: CallFormat) -> list[Reading]:
                def run(call: dict[str, object]) -> list[Reading]:
                    own = {"generator": torch.Generator().manual_seed(0)}  # does not change the global generator
                    pipe, arguments = self.policy.pipe, call | own
                    return readings(pipe, lambda: pipe(**arguments), call, list(self.policy.denoisers.values()))

                return self.called(run, [sample], form)

            stored = self.format.attempt("reading", 1, read)
            keep_readings(folder, stored)
        return cut_prompts(self.policy.pipe, stored, prompts)

    def called(
        self,
        run: Callable[[dict[str, object]], T],
        samples: Sequence[Sample],
        form: CallFormat,
        block: str = "sampling",
        **overrides: object,
    ) -> T:
        """Call `run` with the pipeline's arguments, overridden by keys of `block`; raises `CallRefused` if refused."""
        pipe, sampling = self.policy.pipe, self.sampling
        prompts = [s.prompt.text if s.prompt.turn is None else s.prompt.request for s in samples]
        call = form.arguments(pipeline_call(pipe, sampling, prompts, **overrides))
        try:
            return self._pictured(run, call, samples)
        except PIPELINE_ERRORS as error:
            keys = {name: f"sampling.{name}" for name in call if name not in ("prompt", "output_type")}
            keys |= {name: f"sampling.call.{name}" for name in sampling.call if name in call}  # nulls are not passed
            keys |= {name: f"{block}.{name}" for name, value in overrides.items() if value is not None}
            raise_refusal(error, pipe, {key: call[name] for name, key in keys.items()})
            raise

    def _pictured(self, run: Callable[[dict[str, object]], T], call: dict[str, object], samples: Sequence[Sample]) -> T:
        """Call `run` with the condition images: per batch or, if that fails (pipelines differ), per prompt."""
        count, prompt = len(samples), samples[0].prompt
        if not prompt.metadata and prompt.turn is None:
            return run(call)
        pictures = picture_arguments(self.policy.pipe, prompt)
        each = {name: [picture] * count for name, picture in pictures.items() if not isinstance(picture, list)}
        if count == 1 or not each or self._picture_each:
            return run(call | pictures | (each if count > 1 else {}))
        try:
            return run(call | pictures)
        except (ValueError, RuntimeError, IndexError) as error:
            with contextlib.suppress(ValueError, RuntimeError, IndexError):
                pictured = run(call | pictures | each)
                self._picture_each = True
                return pictured
            raise error


def seeded(samples: Sequence[Sample]) -> list[torch.Generator]:
    """Return the generators of held-out images, as plain diffusers takes them."""
    return [torch.Generator().manual_seed(sample.seed) for sample in samples]


def required_tensors(algorithm: Algorithm, segment: Segment) -> RequiredTensors:
    """Return the tensors of the tape of `segment` that a replay for `algorithm` needs."""
    return RequiredTensors(
        frozenset(segment.trained),
        means=algorithm.needs.recorded_means,
        outputs=algorithm.settings.cfg != "joint",
        forward=not algorithm.needs.trajectory,
        finished=algorithm.needs.finished_latents,
        chain=algorithm.needs.reward_gradient,
    )


def to_uint8(output: BaseOutput) -> np.ndarray:
    """Convert a pipeline's output to images or videos `[B, (F,) H, W, 3]` uint8; raises `ModelError` for others."""
    pixels = find_images(output)
    if pixels.ndim == 5 and pixels.shape[1] == 1:
        pixels = pixels[:, 0]
    if pixels.ndim not in (4, 5):
        raise ModelError(
            f"the pipeline returned an array of shape {list(pixels.shape)}: gerl trains on images [B, H, W, 3] and "
            "videos [B, F, H, W, 3]"
        )
    finite = np.isfinite(pixels).reshape(len(pixels), -1).all(1)
    if not finite.all():
        raise ModelError(
            f"{(~finite).sum()} of {len(pixels)} images have pixels that are not finite (NaN or infinite): use "
            "model.dtype=float32, or bfloat16 rather than float16, and check the weights of the model and its decoder"
        )
    return (pixels * 255).round().astype(np.uint8)


def count_blank(images: Sequence[np.ndarray] | np.ndarray) -> int:
    """Return the number of images `[..., 3]` with a single colour, as a decoder that overflowed produces."""

    def is_blank(colours: np.ndarray) -> bool:
        some = colours[:: max(1, len(colours) // 256)]  # enough to rule out most images that are not blank
        return bool((some == some[0]).all() and (colours == colours[0]).all())

    return sum(is_blank(image.reshape(-1, image.shape[-1])) for image in images)


def find_images(output: BaseOutput) -> np.ndarray:
    """Return the array of an output that holds the images, under any name."""
    arrays = {name: np.asarray(value) for name, value in output.items() if value is not None}
    for name in ("images", "frames"):
        if name in arrays:
            return arrays[name]
    candidates = [value for value in arrays.values() if value.ndim in (4, 5) and value.shape[-1] in (1, 3, 4)]
    if len(candidates) == 1:
        return candidates[0]
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in arrays.items())
    if any("audio" in name for name in arrays):
        raise ModelError(
            f"the pipeline returned sound ({shapes}), which gerl cannot score: it trains images and videos"
        )
    raise ModelError(f"the pipeline returned {shapes or 'nothing'}, which is not a single array of images")
