"""The kinds of schedulers, and the kernel, solver and noise levels that each allows, from their files alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from gerl.config.blocks import KernelName, SamplingConfig, SigmaSpacing, SolverName
from gerl.config.schema import shown
from gerl.errors import ConfigError

if TYPE_CHECKING:
    from gerl.config.configuration import Config

AUTO = "auto"
# what `auto` stands for: the first that the scheduler allows
CHOICES: dict[str, tuple[str, ...]] = {
    "kernel": ("flow_sde", "ddim", "cps"),
    "solver": ("dpm2", "euler"),
    "sigmas": ("linear", "scheduler"),
}
EVERY: dict[str, tuple[str, ...]] = {
    "kernel": get_args(KernelName),
    "solver": get_args(SolverName),
    "sigmas": get_args(SigmaSpacing),
}


@dataclass(frozen=True)
class Kind:
    """A kind of scheduler: its name in a message, and the values of `sampling` that it allows."""

    words: str
    kernel: tuple[str, ...]
    solver: tuple[str, ...] = ("euler",)
    sigmas: tuple[str, ...] = ("scheduler",)

    def allows(self, key: str) -> tuple[str, ...]:
        """Return the allowed values of `sampling.KEY`."""
        allowed: tuple[str, ...] = getattr(self, key)
        return allowed


FLOW = Kind("flow matching", **EVERY)
FLOW_LCM = Kind("a consistency model of flow matching", ("cps", "ode"), sigmas=EVERY["sigmas"])
CONSISTENCY = Kind("a consistency model", ("cps", "ode"))
EDM = Kind("EDM", EVERY["kernel"])
FLOW_MAP = Kind("a flow map", ("ode",), sigmas=EVERY["sigmas"])
DDIM = Kind("DDIM", ("ddim", "ode"))
# by class; gerl.model.schedulers replaces some by one of the same kind
KINDS = {
    "FlowMatchEulerDiscreteScheduler": FLOW,
    "FlowMatchHeunDiscreteScheduler": FLOW,
    "HeliosScheduler": FLOW,
    "HeliosDMDScheduler": FLOW,
    "FlowMatchLCMScheduler": FLOW_LCM,
    "LCMScheduler": CONSISTENCY,
    "TCDScheduler": CONSISTENCY,
    "SCMScheduler": CONSISTENCY,
    "EDMEulerScheduler": EDM,
    "EDMDPMSolverMultistepScheduler": EDM,
    "FlowMapEulerDiscreteScheduler": FLOW_MAP,
} | dict.fromkeys(
    (
        "CogVideoXDDIMScheduler", "CogVideoXDPMScheduler", "DDIMParallelScheduler", "DDIMScheduler",
        "DDPMParallelScheduler", "DDPMScheduler", "DEISMultistepScheduler", "DPMSolverMultistepScheduler",
        "DPMSolverSDEScheduler", "DPMSolverSinglestepScheduler", "EulerAncestralDiscreteScheduler",
        "EulerDiscreteScheduler", "HeunDiscreteScheduler", "KDPM2AncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler", "LMSDiscreteScheduler", "PNDMScheduler", "SASolverScheduler",
        "UnCLIPScheduler", "UniPCMultistepScheduler",
    ),
    DDIM,
)  # fmt: skip
# classes of diffusers without a transition kernel
WITHOUT_KERNEL = {
    "AmusedScheduler", "BlockRefinementScheduler", "CMStochasticIterativeScheduler",
    "CosineDPMSolverMultistepScheduler", "DDIMInverseScheduler", "DDPMWuerstchenScheduler",
    "DPMSolverMultistepInverseScheduler", "DiscreteDDIMScheduler", "EntropyBoundScheduler", "IPNDMScheduler",
    "KarrasVeScheduler", "LTXEulerAncestralRFScheduler", "MiniMaxH3Scheduler", "PiflowScheduler",
    "RFD4ProteinaScheduler", "RePaintScheduler", "ScoreSdeVeScheduler", "VQDiffusionScheduler",
}  # fmt: skip
# pipelines of flow matching whose call takes no noise levels
WITHOUT_SIGMAS = re.compile(
    "AceStep|Bria|ChronoEdit|Cosmos|EasyAnimate|ErnieImage|Ideogram4|Kandinsky5|LTX(?!2|I2V)|LongCatAudio|Lucy|Mochi"
    "|MotifVideo|OmniGen|PRX|SanaSprint|SanaWM|SkyReels|StableAudio|Wan"
)


@dataclass(frozen=True)
class Scheduler:
    """The scheduler of a pipeline, as its files describe it; `kind` is None for a class of other code."""

    name: str
    kind: Kind | None
    settings: Mapping[str, Any]
    pipeline: str = ""  # class

    @classmethod
    def read(cls, settings: Mapping[str, Any], pipeline: str = "") -> "Scheduler":
        """Read a `scheduler_config.json`; `pipeline`: the class in `model_index.json`."""
        name = str(settings.get("_class_name", ""))
        kind = KINDS.get(name)
        if settings.get("prediction_type") == "flow_prediction" and kind is not FLOW_LCM:
            kind = FLOW
        return cls(name, kind, settings, pipeline)

    def allows(self, key: str) -> tuple[str, ...]:
        """Return the allowed values of `sampling.KEY`; those of flow matching if the kind is not known."""
        values = (self.kind or FLOW).allows(key)
        return values if key != "sigmas" or not WITHOUT_SIGMAS.match(self.pipeline) else ("scheduler",)

    @property
    def obstacles(self) -> list[str]:
        """Reasons why its steps have no transition kernel, each with a remedy."""
        if self.kind is None and self.name in WITHOUT_KERNEL:
            return ["it has no transition kernel: give it another with model.parts, such as a DDIMScheduler"]
        sentences, get = [], self.settings.get
        if self.kind in (DDIM, CONSISTENCY) and get("thresholding"):
            sentences.append("latents are not clipped by their own magnitude: set thresholding to false in its file")
        if self.kind is DDIM and get("rescale_betas_zero_snr") and get("prediction_type", "epsilon") == "epsilon":
            sentences.append(
                "with rescale_betas_zero_snr it starts at pure noise, where an epsilon prediction carries no "
                "information: use a v-prediction model, or set it to false in its file"
            )
        if self.kind is FLOW and get("stochastic_sampling"):
            sentences.append("gerl adds the noise itself: set stochastic_sampling to false in its file")
        if self.kind is FLOW_LCM and get("scale_factors"):
            sentences.append("a transition keeps the size of the latents: set scale_factors to null in its file")
        return sentences


def is_open(sampling: Mapping[str, Any]) -> bool:
    """Whether a value in the block `sampling` is still to be chosen."""
    return any(sampling.get(key) == AUTO or isinstance(sampling.get(key), list) for key in CHOICES)


def choose(sampling: Mapping[str, Any], scheduler: Scheduler) -> dict[str, str]:
    """Return the values for keys of the block `sampling` that are `auto`, or a list of which the first possible counts.

    Raises `ConfigError` for other entries in a list.
    """
    values = {}
    for key, usual in CHOICES.items():
        setting = sampling.get(key)
        if setting != AUTO and not isinstance(setting, list):
            continue
        entries = setting if isinstance(setting, list) else [setting]
        if not entries or (wrong := next((entry for entry in entries if entry not in (*EVERY[key], AUTO)), None)):
            one_of = ", ".join((*EVERY[key], AUTO))
            raise ConfigError(f"sampling.{key}={shown(setting if not entries else wrong)}: it must be one of {one_of}")
        wanted = [value for entry in entries for value in (usual if entry == AUTO else (entry,))]
        values[key] = next((value for value in wanted if value in scheduler.allows(key)), wanted[0])
    return values


def check_sampler(config: "Config", scheduler: Scheduler) -> None:
    """Raise `ConfigError` with all reasons why `scheduler` does not fit the configuration."""
    sampling, algorithm, allowed = config.sampling, config.algorithm, scheduler.allows
    reasons = scheduler.obstacles or misfits(sampling, scheduler)
    if scheduler.kind is not None and not scheduler.obstacles:
        if algorithm.needs.leaps and scheduler.kind not in (FLOW, FLOW_LCM):
            reasons.append(f"{algorithm.name} leaps between noise levels of flow matching: use draft, refl or draft_lv")
        if algorithm.needs.noise and allowed("kernel") == ("ode",):
            reasons.append(f"{algorithm.name} needs steps with noise: use neighbor_grpo, which needs none")
        if scheduler.kind is FLOW_MAP and not algorithm.needs.trajectory:
            reasons.append(f"{algorithm.name} learns from noised images, which it does not denoise: use neighbor_grpo")
        if sampling.compression < 1 and "dpm2" not in allowed("solver"):
            reasons.append(f"sampling.compression={sampling.compression:g} needs the solver dpm2: use 1")
    if reasons:
        what = scheduler.name if scheduler.kind is None else f"{scheduler.name} ({scheduler.kind.words})"
        raise ConfigError(f"model.path={config.model.path} has the scheduler {what}: {'; '.join(reasons)}")


def misfits(sampling: SamplingConfig, scheduler: Scheduler) -> list[str]:
    """Return which keys of `sampling` the scheduler does not allow, each with those that it does."""
    sentences = []
    for key in CHOICES if scheduler.kind is not None else ():
        value, allowed = getattr(sampling, key), scheduler.allows(key)
        idle = key == "kernel" and scheduler.kind is FLOW_MAP and sampling.noise_level == 0
        if value not in allowed and not idle:
            sentences.append(f"sampling.{key}={value} is not for it, use {' or '.join(allowed)}")
    return sentences
