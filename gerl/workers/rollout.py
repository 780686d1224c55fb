"""The rollout worker: prompts in, images and tapes out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gerl.config import SamplingConfig, ValidationConfig
from gerl.errors import ModelError
from gerl.protocol import Sample
from gerl.utils.seeding import sample_generators
from gerl.workers.diffusers_model import Tape, record
from gerl.workers.diffusers_model.loading import Policy, pipeline_call


class Rollout:
    """Draws samples with the current LoRA (training) or its average (validation)."""

    def __init__(self, policy: Policy, sampling: SamplingConfig, validation: ValidationConfig) -> None:
        self.policy, self.sampling, self.validation = policy, sampling, validation
        self._probe: Tape | None = None  # the structure of a call is the same in every rollout: probed once

    def generate(self, samples: Sequence[Sample], window: tuple[int, ...]) -> tuple[np.ndarray, Tape]:
        """Images `[B, H, W, 3]` uint8 of `samples`, with noise at the steps of `window`, and their tape."""
        call = pipeline_call(self.policy.pipe, self.sampling, [s.prompt.text for s in samples])
        output, tape = record(
            self.policy.pipe,
            call,
            kernel=self.sampling.kernel,
            noise_level=self.sampling.noise_level,
            window=window,
            generators=sample_generators([s.seed for s in samples]),
            probe=self._probe or True,
        )
        self._probe = tape.probe
        return to_uint8(output), tape

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
