"""The block `sampling`: how trajectories are drawn."""

from dataclasses import dataclass
from typing import Any

from gerl.config.choices import FeatureCacheName, KernelName, SigmaSpacing, SolverName, WindowSchedule, WindowScope
from gerl.config.schema import Block, key, main_key, shown
from gerl.errors import ConfigError

# kernels whose noise is in proportion to the noise that is left: where a schedule ends at 0, the std of their last
# stochastic step is 0.001 to 0.01, and 1 / std makes nearly all of a gradient its own
FADING_KERNELS: tuple[KernelName, ...] = ("cps", "precise", "dance_precise")


@dataclass(frozen=True)
class SamplingConfig(Block):
    height: int | None = main_key(None, "image height in pixels; null: the pipeline's own default", low=8, high=2**15)
    width: int | None = main_key(None, "image width in pixels; null: the pipeline's own default", low=8, high=2**15)
    num_inference_steps: int = main_key(10, "denoising steps of a training rollout", low=2, high=10**4)
    guidance_scale: float | None = main_key(None, "passed to the pipeline; null: the pipeline's own default", low=0)
    sigmas: SigmaSpacing = key(
        "scheduler", "noise levels of a training rollout: the scheduler's own, or linspace(1, 1/steps) before its shift"
    )
    kernel: KernelName = main_key(
        "flow_sde",
        "transition kernel of the stochastic steps; ddim also for epsilon-prediction DDIM; ode: no step is stochastic",
    )
    noise_level: float = main_key(0.7, "noise of the stochastic steps (eta of the kernel's paper)", low=0)
    solver: SolverName = key("euler", "ODE solver of the other steps; dpm2: DPM-Solver++(2M)")
    compression: float = key(
        1.0,
        "share of the steps after the window that are taken, each correspondingly longer (MixGRPO-Flash)",
        above=0,
        high=1,
    )
    cache: FeatureCacheName = key(
        "none",
        "feature cache of the denoiser at the non-stochastic steps, which makes them cheaper and approximate: "
        "blocks after the first skipped, or attention extrapolated; stochastic steps stay exact",
    )
    cache_threshold: float = key(
        0.05, "first_block: change of the first block's residual below which the others are skipped", above=0
    )
    cache_interval: int = key(2, "taylorseer: attention is computed every this many steps", low=2)
    same_init_noise: bool = key(False, "the images of a group start from the same noise (DanceGRPO)")
    init_noise_spread: float = key(
        0.0,
        "distance of a group's initial noises from the one of same_init_noise: 0 equal to it, 1 anywhere",
        low=0,
        high=1,
    )
    window_size: int | None = main_key(
        None, "number of consecutive stochastic (trained) steps; null: all of sampling.window_range", low=1
    )
    window_range: list[int | None] | None = main_key(
        None,
        "[first, end) of the steps that a window may cover or a noise level may come from; null: all but the last "
        "step, with the kernels cps, precise and dance_precise all but the last two; [0, null]: all with ode, all "
        "but the last with other kernels",
    )
    window_stride: int | None = key(
        None, "steps by which a moving window advances; null: its size; 0: it stays at the first steps", low=0
    )
    window_schedule: WindowSchedule = key(
        "random", "random; early ones more likely (TreeGRPO); shift by window_stride; shift faster over time (MixGRPO)"
    )
    window_every: int = key(1, "trainer steps for which a window keeps its position", low=1)
    window_per: WindowScope = key("step", "one random window per trainer step, or per group")
    call: dict[str, Any] = key({}, "further keyword arguments of the pipeline's __call__, such as max_sequence_length")

    def check(self) -> None:
        if self.kernel == "cps" and self.noise_level > 1:
            raise ConfigError(f"sampling.noise_level={self.noise_level}: cps takes at most 1, which re-noises fully")
        drawn = self.window_schedule in ("random", "geometric")
        if not drawn and (self.window_size is None or self.window_per == "group"):
            raise ConfigError(
                f"sampling.window_schedule={self.window_schedule}: a moving window needs a sampling.window_size "
                "and window_per=step"
            )
        if self.init_noise_spread > 0 and not self.same_init_noise:
            raise ConfigError(
                f"sampling.init_noise_spread={self.init_noise_spread}: it is the distance from a noise that the "
                "images of a group share; set sampling.same_init_noise=true as well"
            )
        if self.compression < 1 and self.solver == "euler":
            raise ConfigError(
                f"sampling.compression={self.compression}: longer steps need the second-order sampling.solver=dpm2"
            )
        if self.window_range is not None:
            self._check_range(shown(list(self.window_range)))
        if self.window_size is not None:
            first, end = self.steps_range
            if self.window_size > end - first:
                raise ConfigError(
                    f"sampling.window_size={self.window_size}: only {end - first} steps lie in [{first}, {end}) "
                    f"({self._left_out}); lower it or widen sampling.window_range"
                )

    def _check_range(self, given: str) -> None:
        last = self.num_inference_steps - 1
        if self.window_range is None or len(self.window_range) != 2 or self.window_range[0] is None:
            raise ConfigError(f"sampling.window_range={given}: expected [first, end) with 0 <= first < end")
        first, end = self.steps_range
        if end > self.num_inference_steps:
            raise ConfigError(
                f"sampling.window_range={given}: there are {self.num_inference_steps} steps, end at "
                f"{last if self.kernel != 'ode' else last + 1} or before"
            )
        if not 0 <= first < end:
            raise ConfigError(f"sampling.window_range={given}: expected [first, end) with 0 <= first < end")
        if end > last and self.kernel != "ode":  # noise levels to train at need no noise of the rollout
            raise ConfigError(
                f"sampling.window_range={given}: it covers step {last}, the last of "
                f"{self.num_inference_steps}, which has no noise and no log-probability; end at {last} or before"
            )

    @property
    def steps_range(self) -> tuple[int, int]:
        """[first, end) of the steps that may be stochastic, or of the noise levels that may be trained."""
        left_out = 2 if self.kernel in FADING_KERNELS else 1
        first, end = self.window_range or (0, max(1, self.num_inference_steps - left_out))
        whole = self.num_inference_steps - (self.kernel != "ode")  # the last step has no noise
        return first or 0, whole if end is None else end

    @property
    def _left_out(self) -> str:
        """In words, which steps are left out where no range is given."""
        if self.window_range is None and self.kernel in FADING_KERNELS:
            return f"the last step is deterministic, the one before it has almost no noise with kernel={self.kernel}"
        return "the last step is deterministic"

    @property
    def trained_steps(self) -> int:
        """Number of stochastic steps of a rollout."""
        first, end = self.steps_range
        return self.window_size or end - first
