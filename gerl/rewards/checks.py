"""The check of the reward before any work, and of a step's samples for groups without all their scores."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gerl.config import Config, RewardConfig
from gerl.config.blocks import RunPart
from gerl.data.preferences import check_groups, good_images
from gerl.data.sources import check_mixture, given_images, held_out_of, load, named
from gerl.errors import ConfigError, DataError, RewardError
from gerl.protocol import Group, Prompt, Sample, ScorerFailure
from gerl.rewards.scorers import asks_people, known_scorer
from gerl.rewards.total import applies, check_routes, looking

PARTS: dict[str, RunPart] = {"data.train": "training", "validation.data": "validation"}  # of a run, by their key


def check_reward(config: RewardConfig, prompts: list[Prompt]) -> None:
    """Build every scorer and let it look at all prompts, without loading model weights of gerl's scorers.

    Raises:
        RewardError: a scorer is unknown, not installed, or wrongly configured.
        DataError: a prompt lacks what a scorer needs.
    """
    check_routes(config.scorers, prompts)
    for name, scorer in config.scorers.items():
        known_scorer(name, scorer).check_prompts([prompt for prompt in prompts if applies(scorer, prompt)])


def read_prompts(
    config: Config,
    key: str,
    given: object,
    most: int | None = None,
    arrange: Callable[[list[Prompt]], list[Prompt]] = list,
) -> list[Prompt]:
    """The prompts that `given`, the value of `key`, stands for, or at most `most` of them, all fit for the scorers.

    arrange: makes the prompts of those that the file has in its rows.
    """
    prompts = load(given, config.data, key)
    if key == "data.train":
        check_mixture(config, prompts[:most])
        if given_images(config.data, key):
            try:
                check_groups(prompts, config.rollout.n, config.algorithm.needs.single_images, config.algorithm.name)
            except DataError as error:
                raise DataError(f"{key}={named(given)}: {error}") from None
    try:
        prompts = held_out_of(arrange(prompts), most, given)
        scorers = looking(config.reward.scorers, PARTS[key]) if key in PARTS else config.reward.scorers
        check_reward(replace(config.reward, scorers=scorers), prompts)
    except DataError as error:
        raise DataError(f"{key}={named(given)}: {error}") from None
    return prompts


def read_regularising(config: Config) -> list[Prompt]:
    """The images of `data.regularise`, each with its prompt; raises `DataError`."""
    given, key = config.data.regularise, "data.regularise"
    if given is None:
        if config.algorithm.data_coef:
            raise ConfigError(
                f"algorithm.data_coef={config.algorithm.data_coef:g}: there are no images to imitate; set "
                "data.regularise to a file of them, or set algorithm.data_coef=0"
            )
        return []
    try:
        return good_images(load(given, config.data, key))
    except DataError as error:
        said = str(error)
        raise DataError(said if said.startswith(key) else f"{key}={named(given)}: {said}") from None


def without_people(config: RewardConfig) -> RewardConfig:
    """The reward without people, who are asked while a run trains and never else.

    Raises `ConfigError` if no scorer with a weight is left.
    """
    asked = [name for name, scorer in config.scorers.items() if scorer.path is None and asks_people(name)]
    if not asked:
        return config
    scorers = {name: scorer for name, scorer in config.scorers.items() if name not in asked}
    if not any(scorer.weight for scorer in scorers.values()):
        raise ConfigError(
            f"reward.scorers.{asked[0]}: people vote in training only; use a measuring scorer instead, such as "
            "reward.scorers.clipscore.weight=1"
        )
    return replace(config, scorers=scorers)


def usable_groups(
    samples: Sequence[Sample],
    totals: Sequence[float | None],
    failures: Sequence[Sequence[ScorerFailure]],
    config: RewardConfig,
) -> tuple[list[bool], list[str]]:
    """Which samples [B] can be trained on, and one sentence for each group that cannot.

    A sample without a total takes its whole group with it: the group's mean and spread would be of other images than
    intended. `samples`, `totals` and `failures` are those of a step, in one order.

    Raises:
        RewardError: a sample failed and `reward.on_error` is `stop`, more than `reward.max_failed` of them failed, or
            no group is left.
    """
    dropped: dict[Group, str] = {}
    for sample, total, causes in zip(samples, totals, failures, strict=True):
        if total is None and sample.group not in dropped:
            dropped[sample.group] = unscored(f"image {sample.index} of {sample.prompt.text!r}", causes)
    if dropped:
        first = next(iter(dropped.values()))
        check_failures(totals, first, config, f"images of step {samples[0].step}", "let such groups be dropped")
    keep = [sample.group not in dropped for sample in samples]
    if not any(keep):
        raise RewardError(
            f"no group of step {samples[0].step} has all its scores, so there is nothing to train on; the first "
            f"failure: {next(iter(dropped.values()))}; fix the scorer"
        )
    return keep, [f"group dropped: {reason}" for reason in dropped.values()]


def unscored(image: str, causes: Sequence[ScorerFailure]) -> str:
    """Why an image has no total, by its first failure."""
    return f"scorer {causes[0].scorer} has no score for {image}: {causes[0].reason}"


def check_failures(totals: Sequence[float | None], first: str, config: RewardConfig, images: str, instead: str) -> None:
    """Raise `RewardError` if too many of `totals` [B] are missing, or any is and `reward.on_error` is `stop`.

    `first` is the first failure, `images` what was scored, `instead` what `reward.on_error=drop_group` would do.
    """
    failed = sum(total is None for total in totals) / len(totals)
    if failed and config.on_error == "stop":
        raise RewardError(f"{first}; fix the scorer, or {instead} with reward.on_error=drop_group")
    if failed > config.max_failed:
        raise RewardError(
            f"{failed:.0%} of the {images} have no reward, more than reward.max_failed={config.max_failed:g}; the "
            f"first failure: {first}; fix the scorer and resume with checkpoint.resume=auto"
        )
