"""Scorers of the experiment that the reward of a run replaces: watched in validation, if that costs no download."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gerl.config import Config, ScorerConfig
from gerl.errors import GerlError
from gerl.protocol import Prompt
from gerl.rewards.scorers import known_scorer
from gerl.rewards.scorers.weights import WEIGHTS, missing
from gerl.rewards.total import applies


def keep_watched(
    config: Config, replaced: Mapping[str, ScorerConfig], prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> tuple[Config, str]:
    """Add the `replaced` scorers with weight 0, during validation; return the configuration and a sentence about them.

    Those that this machine lacks something for, or that cannot score `prompts` and `held_out`, are left out.
    """
    watched = {name: replace(scorer, weight=0.0, during="validation") for name, scorer in replaced.items()}
    reasons = {name: _obstacle(config, name, scorer, prompts, held_out) for name, scorer in watched.items()}
    scorers = {name: scorer for name, scorer in watched.items() if not reasons[name]}
    sentences = []
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name in reasons if reasons[name] == reason]
        stay, are, them = ("stays", "is", "it") if len(names) == 1 else ("stay", "are", "them")
        removal = " ".join(f"'~reward.scorers.{name}'" for name in names)
        what = f"{stay} watched in validation, unless you remove {them} with {removal}"
        sentences.append(
            f"{' and '.join(names)} of the experiment {f'{are} not watched: {reason}' if reason else what}"
        )
    return _with_scorers(config, scorers), "; ".join(sentences)


def _obstacle(
    config: Config, name: str, scorer: ScorerConfig, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> str:
    """Return why a scorer that is no longer rewarded cannot be watched, "" if it can."""
    if not any(applies(scorer, prompt) for prompt in held_out):
        return "it scores none of the held-out prompts" if held_out else "there are no held-out prompts"
    if scorer.path is not None or scorer.env or name not in WEIGHTS:
        return f"it may need a service or a download; to watch it, give it again with reward.scorers.{name}.weight=0"
    if lacking := missing(name, scorer.kwargs):
        return f"{lacking} is not on this machine; to watch it, give it again with reward.scorers.{name}.weight=0"
    if scorer.gpus and any(config.reward.gpu_shares):
        return f"a GPU may not have room for both; to watch it, give it again with reward.scorers.{name}.weight=0"
    try:
        known_scorer(name, scorer).check_prompts([p for p in (*prompts, *held_out) if applies(scorer, p)])
        _with_scorers(config, {name: scorer})
    except (GerlError, ImportError) as error:
        return str(error)
    return ""


def _with_scorers(config: Config, scorers: Mapping[str, ScorerConfig]) -> Config:
    return replace(config, reward=replace(config.reward, scorers={**config.reward.scorers, **scorers}))
