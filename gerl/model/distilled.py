"""Models that were distilled: to few denoising steps, or to take their guidance as an input."""

import re
from collections.abc import Mapping

import torch

from gerl.config import Config
from gerl.config.algorithms import ForwardProcessConfig

# schedulers that only models of few steps come with: consistency models and flow maps
SCHEDULERS = ("LCMScheduler", "TCDScheduler", "SCMScheduler", "FlowMatchLCMScheduler", "FlowMapEulerDiscreteScheduler")
# what such models are called; FLUX.2 klein is one, its base is not, nor is a model whose distillation was undone
NAMES = re.compile(
    r"(?<![a-z])(turbo|schnell|lightning|lcm|tcd|dmd2?|tdm|sprint|hyper-?(?:sd|flux)|(?<!\d)[1-8]-?steps?"
    r"|(?<!de-)(?<!guidance-)(?<!cfg-)distill(?:ed|ation)?|klein(?!-base))(?![a-z])",
    re.IGNORECASE,
)
EXCESS = ("flow_sde", "dance_sde")  # kernels that leave more noise in late steps than the schedule has


def few_steps(path: str, scheduler: str) -> str | None:
    """Why the pipeline of `path` counts as one of few steps, in words; None where it does not.

    `scheduler`: the class of the one that it came with.
    """
    if scheduler in SCHEDULERS:
        return f"it comes with {scheduler}"
    found = NAMES.search(re.split(r"[/\\]", path.rstrip("/\\"))[-1].replace("_", "-"))
    return f"its name has {found[0]!r}" if found else None


def distilled_warnings(config: Config, scheduler: str) -> list[str]:
    """Sentences where a model of few steps is trained in a way that is known to harm it; `scheduler` as above."""
    algorithm, path = config.algorithm, config.model.path
    reason = few_steps(path, scheduler)
    if reason is None:
        return []
    model = f"{path} is a few-step model ({reason})"
    if isinstance(algorithm, ForwardProcessConfig):
        return [
            f"{model}: algorithm.name={algorithm.name} trains on noised images, which blurs such models "
            "(docs/models.md); use a policy gradient on its own steps, such as algorithm=few_step_grpo, or train "
            "the model that it was distilled from"
        ]
    if algorithm.scores_steps and config.sampling.kernel in EXCESS:
        return [
            f"{model}: sampling.kernel={config.sampling.kernel} leaves more noise in its steps than it was trained "
            "with; use kernel=cps"
        ]
    return []


def guidance_notes(denoisers: Mapping[str, torch.nn.Module]) -> list[str]:
    """A sentence for each denoiser that takes the guidance scale as an input."""
    taken = [name for name, d in denoisers.items() if getattr(d, "config", {}).get("guidance_embeds")]
    return [
        f"the guidance of {name} is one of its inputs, by distillation: there is one pass per step, and "
        "algorithm.cfg has nothing to split"
        for name in taken
    ]
