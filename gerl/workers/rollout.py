"""The rollout worker: prompts in, images and trajectories out."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from diffusers.utils import BaseOutput

from gerl.algorithms import Algorithm
from gerl.config import SamplingConfig, ValidationConfig
from gerl.engine import Reads, Tape, Trajectory, branch, lean, record
from gerl.engine.transitions import Sampler, check_scheduler
from gerl.errors import ModelError
from gerl.model.loading import Policy, pipeline_call, training_sigmas
from gerl.protocol import RolloutTask, Sample, Segment
from gerl.utils.condition_images import picture_arguments
from gerl.utils.seeding import sample_generators

T = TypeVar("T")


class Rollout:
    """Draws samples with the current LoRA (training) or its average (validation)."""

    def __init__(self, policy: Policy, sampling: SamplingConfig, validation: ValidationConfig) -> None:
        self.policy, self.sampling, self.validation = policy, sampling, validation
        check_scheduler(policy.pipe.scheduler, Sampler(sampling.kernel, sampling.noise_level, sampling.solver))
        self._picture_each = False
        self._probe: Tape | None = None  # the structure of a call is the same in every rollout: probed once

    def generate(self, task: RolloutTask, algorithm: Algorithm, owner: int = 0) -> tuple[np.ndarray, Trajectory]:
        """Images `[B, H, W, 3]` uint8 of the samples of `task`, and their trajectory for training with `algorithm`.

        `owner`: rank of this worker.
        """
        pixels, tapes = self.draw(task)
        # not before all is drawn: branches go on from outputs that no replay reads
        kept = tuple(lean(t, reads_of(algorithm, s)) for t, s in zip(tapes, task.segments, strict=True))
        return pixels, Trajectory(task, kept, self.policy.version, owner)

    def draw(self, task: RolloutTask) -> tuple[np.ndarray, list[Tape]]:
        """Images `[B, H, W, 3]` uint8 of the samples of `task`, and the whole tape of each segment."""
        tapes: list[Tape] = []
        images: list[np.ndarray] = []
        with self.policy.as_sampler():
            for segment in task.segments:
                output, tape = self._draw(task, segment, tapes)
                tapes.append(tape)
                if segment.stop is None:
                    images.append(to_uint8(output))
        return np.concatenate(images), tapes

    def _draw(self, task: RolloutTask, segment: Segment, tapes: list[Tape]) -> tuple[BaseOutput | None, Tape]:
        sampling, pipe = self.sampling, self.policy.pipe
        options: dict[str, Any] = {
            "kernel": sampling.kernel,
            "noise_level": sampling.noise_level,
            "window": segment.window,
            "generators": sample_generators(list(segment.seeds)),
            "solver": sampling.solver,
            "compression": sampling.compression,
            "stop": segment.stop,
        }
        if segment.parent is not None:
            return branch(pipe, tapes[segment.parent], segment.start, segment.rows, **options)
        samples = [task.samples[leaf] for leaf in segment.leaves]
        initial = [s.init_seed for s in samples if s.init_seed is not None]
        options["init_generators"] = sample_generators(initial) if initial else None

        def draw(call: dict[str, object]) -> tuple[BaseOutput | None, Tape]:
            return record(pipe, call, probe=self._probe or True, **options)

        output, tape = self._called(draw, samples, sigmas=training_sigmas(sampling))
        self._probe = tape.probe
        return output, tape

    def validate(self, samples: Sequence[Sample]) -> np.ndarray:
        """Images `[B, H, W, 3]` uint8 of the plain pipeline (ODE sampling), with the averaged LoRA."""
        with self.policy.ema.swapped_in():
            return self._called(
                lambda call: to_uint8(self.policy.pipe(**call, generator=sample_generators([s.seed for s in samples]))),
                samples,
                num_inference_steps=self.validation.num_inference_steps,
                guidance_scale=self.validation.guidance_scale,
            )

    def _called(self, draw: Callable[[dict[str, object]], T], samples: Sequence[Sample], **overrides: object) -> T:
        """`draw` of the pipeline's arguments for samples that are drawn together, which have the same pictures if any.

        Some pipelines want a batch's picture once, others once for each prompt: where one is refused, the other is
        tried, and kept to.
        """
        pipe, count = self.policy.pipe, len(samples)
        call = pipeline_call(pipe, self.sampling, [sample.prompt.text for sample in samples], **overrides)
        given = picture_arguments(pipe, samples[0].prompt)
        each = {name: [picture] * count for name, picture in given.items() if not isinstance(picture, list)}
        if count == 1 or not each or self._picture_each:
            return draw(call | given | (each if count > 1 else {}))
        try:
            return draw(call | given)
        except (ValueError, RuntimeError, IndexError) as error:
            with contextlib.suppress(ValueError, RuntimeError, IndexError):
                drawn = draw(call | given | each)
                self._picture_each = True
                return drawn
            raise error


def reads_of(algorithm: Algorithm, segment: Segment) -> Reads:
    """The parts of the tape of `segment` that `algorithm` reads."""
    return Reads(
        frozenset(segment.trained),
        means=algorithm.reads_means,
        outputs=algorithm.settings.cfg != "joint",
        forward=not algorithm.settings.scores_steps,
    )


def to_uint8(output: BaseOutput) -> np.ndarray:
    """Images `[B, H, W, 3]` or videos `[B, F, H, W, 3]` of a pipeline output with `output_type="np"`, as uint8.

    Rounds as diffusers does. A video of one frame is an image.
    """
    pixels = np.asarray(output.images if "images" in output else output.frames)
    if pixels.ndim == 5 and pixels.shape[1] == 1:
        pixels = pixels[:, 0]
    if pixels.ndim not in (4, 5):
        raise ModelError(
            f"the pipeline returned an array of shape {list(pixels.shape)}: gerl trains on images [B, H, W, 3] and "
            "videos [B, F, H, W, 3]"
        )
    return (pixels * 255).round().astype(np.uint8)
