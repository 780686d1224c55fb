"""Checks of the reward and the prompts before a run starts."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from gerl.config import Config, RewardConfig
from gerl.config.blocks import HELD_OUT, RunPart
from gerl.config.held_out import OF_EVERY_COLUMN, REWARD, chosen, parts, unknown
from gerl.data.preferences import check_groups, images_to_imitate
from gerl.data.sources import (
    check_mixture,
    contrasted,
    limit_prompts,
    load,
    load_split,
    rows_have_images,
    source_names,
)
from gerl.errors import ConfigError, DataError
from gerl.protocol import DATA_SOURCE, Prompt
from gerl.rewards.scorers import asks_people, known_scorer
from gerl.rewards.total import active_scorers, applies, check_routes, metric_name

REWARDS = (
    "'reward.scorers={pickscore: {}}' (what people prefer)",
    "'reward.scorers={ocr: {}}' (texts that the prompts have in double quotes)",
    "'reward.scorers={mine: {path: my_reward.py}}' (your own function)",
)
PARTS: dict[str, RunPart] = {"data.train": "training", "validation.data": "validation"}  # by configuration key


def check_named(config: RewardConfig, also: str = "") -> None:
    """Raise `ConfigError`, offering three, if there is no reward; `also`: what else is missing."""
    if not config.scorers:
        raise ConfigError(f"there is no reward: choose {', '.join(REWARDS[:-1])} or {REWARDS[-1]}{also}")


def check_reward(config: RewardConfig, prompts: list[Prompt]) -> None:
    """Build every scorer (`RewardError`) and check all prompts with it (`DataError`), without loading weights."""
    check_routes(config.scorers, prompts)
    for name, scorer in config.scorers.items():
        known_scorer(name, scorer).check_prompts([prompt for prompt in prompts if applies(scorer, prompt)])


def read_prompts(
    config: Config,
    key: str,
    entries: object,
    most: int | None = None,
    arrange: Callable[[list[Prompt]], list[Prompt]] = list,
) -> list[Prompt]:
    """Read at most `most` prompts of `entries`, the value of `key`, as `arrange` orders them, and check the scorers."""
    prompts = load_split(config, key, entries)
    if key == "data.train":
        check_mixture(config, prompts[:most])
        if rows_have_images(config.data, key):
            try:
                check_groups(prompts, config.rollout.n, config.algorithm.needs.single_images, config.algorithm.name)
            except DataError as error:
                raise DataError(f"{key}={source_names(entries)}: {error}") from None
    try:
        prompts = limit_prompts(arrange(prompts), most, config.data.train if entries == HELD_OUT else entries)
        scorers = active_scorers(config.reward.scorers, PARTS[key]) if key in PARTS else config.reward.scorers
        check_reward(replace(config.reward, scorers=scorers), prompts)
    except DataError as error:
        raise DataError(f"{key}={source_names(entries)}: {error}") from None
    return contrasted(prompts) if config.needs_base else prompts


def read_regularising(config: Config) -> list[Prompt]:
    """Read the images of `data.regularise`, each with its prompt; raises `DataError`."""
    entries, key = config.data.regularise, "data.regularise"
    if entries is None:
        if config.algorithm.data_coef:
            raise ConfigError(
                f"algorithm.data_coef={config.algorithm.data_coef:g}: there are no images to imitate; set "
                "data.regularise to a file of them, or set algorithm.data_coef=0"
            )
        return []
    try:
        return images_to_imitate(load(entries, config.data, key))
    except DataError as error:
        text = str(error)
        raise DataError(text if text.startswith(key) else f"{key}={source_names(entries)}: {text}") from None


def check_held_out_metrics(config: Config, held_out: Sequence[Prompt], columns: Collection[str] = ()) -> None:
    """Raise `ConfigError` if `checkpoint.best` names a metric that no validation has, see `check_chosen`."""
    data_sources = (prompt.metadata.get(DATA_SOURCE) for prompt in held_out)
    check_chosen(config, columns, sorted({metric_name(source) for source in data_sources if source is not None}))


def without_people(config: RewardConfig) -> RewardConfig:
    """Return the reward without human feedback; raises `ConfigError` if no scorer with a weight is left."""
    people = [name for name, scorer in config.scorers.items() if scorer.path is None and asks_people(name)]
    if not people:
        return config
    scorers = {name: scorer for name, scorer in config.scorers.items() if name not in people}
    if not any(scorer.weight for scorer in scorers.values()):
        raise ConfigError(
            f"reward.scorers.{people[0]}: people vote in training only; use a measuring scorer instead, such as "
            "reward.scorers.clipscore.weight=1"
        )
    return replace(config, scorers=scorers)


def held_out_metrics(config: Config, columns: Iterable[str] = (), sources: Collection[str] = ()) -> list[str]:
    """Return the held-out metrics of a run, given further `columns` of its scorers and the prompts' data `sources`.

    Without `gain` and its interval, which every column with a mean has too.
    """
    validation = config.validation
    scorers = {name: scorer for name, scorer in config.reward.scorers.items() if scorer.during != "training"}
    metrics = [REWARD, *(f"val/reward/{source}/mean" for source in sources if len(sources) > 1)]
    several = validation.images_per_prompt > 1
    metrics += ["val/reward/best_of_n"] if several else []
    for column in dict.fromkeys([*scorers, *columns]):
        names = ["mean", *(["best_of_n"] if several else [])]
        if column in scorers and scorers[column].success is not None:
            names += ["success_rate", "success_rate_low", "success_rate_high"]
            names += [f"pass_at_{k + 1}" for k in range(validation.images_per_prompt) if several]
        metrics += [f"val/{column}/{name}" for name in names]
    return metrics + (["val/base/alignment/mean", "val/base/surprise/mean"] if config.judges else [])


def check_chosen(config: Config, columns: Collection[str] = (), sources: Collection[str] = ()) -> None:
    """Raise `ConfigError` with a list if a key names a held-out metric that no validation of the run has.

    columns: of the scorers that have been tried. sources: data sources of the held-out prompts.
    """
    metrics = held_out_metrics(config, columns, sources)
    for key, metric in chosen(config.checkpoint.best, config.trainer.stop_at).items():
        column, statistic = parts(metric)
        scorer, _, further = column.partition("/")
        untried = bool(further) and scorer in config.reward.scorers and scorer not in columns
        mean = f"val/{column}/mean" if statistic in OF_EVERY_COLUMN else metric
        if mean not in metrics and not (untried and statistic in (*OF_EVERY_COLUMN, "best_of_n")):
            raise ConfigError(unknown(key, metric, metrics))
