"""The rollout worker: prompts in, images and tapes out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gerl.config import SamplingConfig, ValidationConfig
from gerl.errors import ModelError
from gerl.protocol import RolloutTask, Sample, Segment
from gerl.utils.seeding import sample_generators
from gerl.workers.diffusers_model import Tape, branch, record
from gerl.workers.diffusers_model.loading import Policy, pipeline_call, training_sigmas
from gerl.workers.diffusers_model.transitions import Sampler, check_scheduler


class Rollout:
    """Draws samples with the current LoRA (training) or its average (validation)."""

    def __init__(self, policy: Policy, sampling: SamplingConfig, validation: ValidationConfig) -> None:
        self.policy, self.sampling, self.validation = policy, sampling, validation
        check_scheduler(policy.pipe.scheduler, Sampler(sampling.kernel, sampling.noise_level, sampling.solver))
        self._probe: Tape | None = None  # the structure of a call is the same in every rollout: probed once

    def generate(self, task: RolloutTask) -> tuple[np.ndarray, list[Tape]]:
        """Images `[B, H, W, 3]` uint8 of the samples of `task`, and a tape per segment."""
        tapes: list[Tape] = []
        images: list[np.ndarray] = []
        with self.policy.as_sampler():
            for segment in task.segments:
                output, tape = self._draw(task, segment, tapes)
                tapes.append(tape)
                if segment.stop is None:
                    images.append(to_uint8(output))
        return np.concatenate(images), tapes

    def _draw(self, task: RolloutTask, segment: Segment, tapes: list[Tape]) -> tuple[Any, Tape]:
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
        call = pipeline_call(pipe, sampling, [s.prompt.text for s in samples], sigmas=training_sigmas(sampling))
        initial = [s.init_seed for s in samples if s.init_seed is not None]
        options["init_generators"] = sample_generators(initial) if initial else None
        output, tape = record(pipe, call, probe=self._probe or True, **options)
        self._probe = tape.probe
        return output, tape

    def validate(self, samples: Sequence[Sample]) -> np.ndarray:
        """Images `[B, H, W, 3]` uint8 of the plain pipeline (ODE sampling), with the averaged LoRA."""
        call = pipeline_call(
            self.policy.pipe,
            self.sampling,
            [s.prompt.text for s in samples],
            num_inference_steps=self.validation.num_inference_steps,
            guidance_scale=self.validation.guidance_scale,
        )
        with self.policy.ema.swapped_in():
            return to_uint8(self.policy.pipe(**call, generator=sample_generators([s.seed for s in samples])))


def to_uint8(output: Any) -> np.ndarray:
    """The images of a pipeline output with `output_type="np"`, as `[B, H, W, 3]` uint8; rounds as diffusers does."""
    images = output.images if "images" in output else output.frames
    images = np.asarray(images)
    if images.ndim == 5 and images.shape[1] == 1:
        images = images[:, 0]
    if images.ndim != 4:
        raise ModelError(
            f"the pipeline returned an array of shape {list(images.shape)}: gerl trains on images [B, H, W, 3]"
        )
    return (images * 255).round().astype(np.uint8)
