"""Held-out metrics that keys name: which there are, and when an unknown one is refused."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from gerl.config import Config, RewardConfig, ScorerConfig, ValidationConfig, from_mapping
from gerl.config.held_out import BY_REWARD, Criterion, parts
from gerl.errors import ConfigError
from gerl.progress import Stopwatch
from gerl.protocol import Prompt
from gerl.rewards.checks import check_chosen, check_held_out_metrics, held_out_metrics
from gerl.trainer.extensions.chosen_metrics import ChosenMetrics
from gerl.trainer.step import Step

SCORERS = {"ocr": {"success": 0.9}, "lpips": {"path": "f.py", "weight": 0}}


def config(best: str = "val/reward/mean", **blocks: Mapping[str, Any]) -> Config:
    return from_mapping({"reward": {"scorers": SCORERS}, "checkpoint": {"best": best}, **blocks})


def test_a_minus_in_front_prefers_lower_values() -> None:
    assert Criterion.parse("val/reward/mean") == BY_REWARD and not BY_REWARD.lower
    lower = Criterion.parse("-val/lpips/mean")
    assert lower == Criterion("val/lpips/mean", lower=True) and lower.rank(0.2) > lower.rank(0.3)
    assert parts("val/ocr/exact/mean") == ("ocr/exact", "mean") and parts("reward/mean") == ("", "")


@pytest.mark.parametrize("best", ["ocr", "val/ocr", "reward/mean", "--val/ocr/mean", ""])
def test_a_name_of_another_form_is_refused_with_the_configuration(best: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.best=.*val/COLUMN/STATISTIC"):
        config(best)


def test_without_held_out_prompts_there_is_no_held_out_metric() -> None:
    none = {"data": None}
    assert config(validation=none).checkpoint.best == "val/reward/mean"
    with pytest.raises(ConfigError, match=r"checkpoint\.best=-val/reward/mean: .*validation\.data=null"):
        config("-val/reward/mean", validation=none)


@pytest.mark.parametrize(
    "best",
    ["-val/reward/mean", "val/ocr/mean", "-val/lpips/gain_high", "val/ocr/success_rate_low", "val/base/surprise/gain"],
)
def test_what_every_validation_has_is_known_at_once(best: str) -> None:
    check_held_out_metrics(config(best), [Prompt(0, "a")])


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ("val/orc/mean", "did you mean val/ocr/mean"),
        ("val/lpips/success_rate", "val/ocr/success_rate"),  # it has no threshold
        ("val/ocr/pass_at_2", "val/lpips/mean"),  # one image per prompt
        ("-val/ocr/median", "val/reward/mean"),
        ("val/reward/signs/mean", "val/reward/mean"),
    ],
)
def test_an_unknown_metric_is_refused_with_the_list(best: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_held_out_metrics(config(best), [Prompt(0, "a", {"data_source": "signs"})])
    assert f"checkpoint.best={best}: " in str(caught.value) and said in str(caught.value)


def test_several_images_and_several_data_sources_have_metrics_of_their_own() -> None:
    c = config("val/ocr/pass_at_2", validation={"images_per_prompt": 2})
    check_chosen(c)
    assert [name for name in held_out_metrics(c) if "pass" in name] == ["val/ocr/pass_at_1", "val/ocr/pass_at_2"]
    assert [n for n in held_out_metrics(c) if "best" in n] == [
        f"val/{column}/best_of_n" for column in ("reward", "ocr", "lpips")
    ]
    prompts = [Prompt(i, "a", {"data_source": source}) for i, source in enumerate(("a/b", "c"))]
    check_held_out_metrics(config("val/reward/a_b/mean"), prompts)


def test_columns_of_scorers_are_known_once_these_have_been_tried() -> None:
    c = config("val/ocr/exact/mean")
    check_chosen(c)  # it may come
    check_chosen(c, ["ocr", "ocr/exact", "lpips"])
    check_chosen(c, ["lpips"])  # the scorer of weight 0 failed in its trial
    with pytest.raises(ConfigError, match="did you mean val/ocr/exact/mean"):
        check_chosen(config("val/ocr/exakt/mean"), ["ocr", "ocr/exact"])
    only = RewardConfig({"ocr": ScorerConfig(), "late": ScorerConfig(weight=0.0, during="training")})
    assert "val/late/mean" not in held_out_metrics(Config(reward=only))


def test_the_first_validation_has_the_last_word() -> None:
    c, run = config("val/ocr/exact/mean"), SimpleNamespace()
    extension = ChosenMetrics(c)
    assert ChosenMetrics.wanted(c) and not ChosenMetrics.wanted(Config(validation=ValidationConfig(every=3)))
    step = Step(0, Stopwatch(), metrics={"val/reward/mean": 0.5, "val/ocr/mean": 0.5, "val/ocr/exact/mean": 0.1})
    extension.validated(run, step)  # type: ignore[arg-type]
    del step.metrics["val/ocr/exact/mean"]
    with pytest.raises(ConfigError, match=r"val/ocr/exact/mean; .*val/ocr/mean"):
        extension.validated(run, step)  # type: ignore[arg-type]
