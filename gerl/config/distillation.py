"""The keys of the algorithms that learn from teachers, step by step, rather than from rewards."""

from dataclasses import dataclass
from typing import Any, Literal

from gerl.config.algorithm_keys import AlgorithmConfig, name_key
from gerl.config.choices import StepDistance
from gerl.config.policy_gradients import FlowGRPOConfig
from gerl.config.sampling import SamplingConfig
from gerl.config.schema import key, main_key, shown
from gerl.config.teachers import Teacher, teachers
from gerl.errors import ConfigError


@dataclass(frozen=True)
class OPDConfig(AlgorithmConfig):
    replays_latents = True

    name: Literal["opd"] = name_key("opd")
    teachers: list[dict[str, Any]] = main_key(
        [{"guidance": 4.5}],
        "what to learn from: [{lora: CHECKPOINT, data_source: ocr}, {path: PIPELINE, data_source: colour}]; "
        "without lora and path it is the base model, with another guidance scale",
    )
    distance: StepDistance = main_key(
        "gaussian",
        "distance of a step to the teacher's: the KL of the two Gaussians; half the squared distance of their "
        "means, also of steps without noise; or the squared distance of the outputs, which weighs all steps equally",
    )
    timesteps: int | None = main_key(
        None, "noise levels trained per trainer step; null: all in the range", low=1
    )  # of those with noise, if there is any

    @property
    def groups_of_one(self) -> bool:
        return True

    @property
    def taught_by(self) -> list[Teacher]:
        """The entries of `teachers`."""
        return teachers(self.teachers)

    def check(self) -> None:
        super().check()
        if not self.taught_by:
            raise ConfigError(
                f"algorithm.teachers=[]: {self.name} learns from teachers; add one, such as "
                "'algorithm.teachers=[{lora: CHECKPOINT}]'"
            )
        if self.dynamic_sampling:
            raise ConfigError(
                f"algorithm.dynamic_sampling={self.dynamic_sampling}: {self.name} learns from all images, "
                "regardless of their rewards; use 0"
            )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if self.distance == "gaussian" and (sampling.noise_level == 0 or sampling.kernel == "ode"):
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: steps without noise have no KL to the teacher; use algorithm.distance=mean or "
                "velocity, or kernel=cps with noise_level=0.8"
            )
        for teacher in self.taught_by:
            same = teacher.guidance is not None and teacher.guidance == sampling.guidance_scale and not teacher.call
            if teacher.is_base and same and self.cfg != "off":
                raise ConfigError(
                    f"algorithm.teachers={shown(self.teachers)}: the base model with the guidance of the rollout "
                    "is identical to the initial student; set another guidance, or lora or path"
                )


@dataclass(frozen=True)
class DMDRConfig(FlowGRPOConfig):
    imitates = True

    name: Literal["dmdr"] = name_key("dmdr")  # type: ignore[assignment]
    teachers: list[dict[str, Any]] = key(
        [],
        "the model whose images a few-step model should match, [{path: PIPELINE, guidance: 4.5}]; []: the model "
        "that training starts from",
    )
    matching_coef: float = main_key(0.01, "weight of distribution matching", low=0)
    matching_steps: int = key(
        20, "noise levels at which images are compared: those of this many denoising steps", low=2, high=1000
    )
    fake_scale: float = key(
        2.0,
        "alpha of the LoRA that imitates the images, relative to that of the trained one: how fast it follows",
        above=0,
    )

    @property
    def taught_by(self) -> list[Teacher]:
        return teachers(self.teachers)

    def check(self) -> None:
        super().check()
        if len(self.taught_by) > 1 or any(t.data_source is not None for t in self.taught_by):
            raise ConfigError(
                f"algorithm.teachers={shown(self.teachers)}: {self.name} compares with one model, for all prompts; "
                "give one entry without data_source"
            )
