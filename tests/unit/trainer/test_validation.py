"""A validation: which images are kept and shown, its mean, and when it has none."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from crediting import PROMPTS, config, scored

from gerl.algorithms.planning import plan_validation
from gerl.cluster import Pending
from gerl.config import ScorerConfig, ValidationConfig
from gerl.errors import RewardError
from gerl.protocol import Images, Prompt, Sample, ScorerFailure, Scores
from gerl.run.validation import estimate_share
from gerl.trainer.step import reward_metrics
from gerl.trainer.validation import caption, chosen_pixels, conclude_validation, shown_images
from gerl.utils.dataset import load_prompts


def test_the_pictures_are_spread_over_the_file_and_always_the_same() -> None:
    shown = shown_images(128, ValidationConfig())
    assert [i // 4 for i in shown] == list(range(32)) and shown == shown_images(128, ValidationConfig())
    assert set(Counter(i % 4 for i in shown)) == {0, 1, 2, 3}  # also where kinds of prompts take turns
    assert shown_images(5, ValidationConfig()) == shown_images(5, ValidationConfig(images=None)) == list(range(5))
    assert len(shown_images(100, ValidationConfig(images=1))) == 1


def test_all_images_of_the_same_prompts_are_shown() -> None:
    one, three = (shown_images(20 * n, ValidationConfig(images=4, images_per_prompt=n)) for n in (1, 3))
    assert three == [3 * i + k for i in one for k in range(3)]


def test_words_as_well_as_numbers_of_the_signs_are_shown() -> None:
    prompts = load_prompts("signs_val")
    shown = [prompts[i].text.split('"')[1].isdigit() for i in shown_images(len(prompts), ValidationConfig())]
    assert shown.count(True) == shown.count(False) == 16


def test_the_chosen_pictures_are_found_in_their_batches() -> None:
    samples = [Sample(Prompt(i, "x"), 0, i, 1) for i in range(5)]
    batches = [samples[:2], samples[2:4], samples[4:]]
    pixels = np.arange(5, dtype=np.uint8)[:, None, None, None].repeat(3, 3)
    parts = [slice(batch[0].seed, batch[-1].seed + 1) for batch in batches]
    red = np.arange(5.0)
    drawn = [Pending("w", value=Images(k, pixels[s], 0.0, {"red": red[s]})) for k, s in enumerate(parts)]
    found, looks = chosen_pixels(drawn, batches, [1, 4])
    assert [int(image[0, 0, 0]) for image in found] == [1, 4] and list(looks["red"]) == list(red)  # of all images


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('a sign that reads "482"', "482"),
        ("a sign that reads \u201cEXIT\u201d now", "EXIT"),
        ("ein Schild: \u201eHalt\u201c", "Halt"),
        ("une pancarte \u00abNON\u00bb", "NON"),
        ("a red fox, it's fine", "a red fox, it's fine"),
        ('half a "quote', 'half a "quote'),
    ],
)
def test_the_caption_is_the_text_to_be_drawn(text: str, shown: str) -> None:
    assert caption(text, 0.126) == f"0.13 {shown}" and caption(text, None) == f"failed {shown}"
    assert caption(text, None, failed=False) == shown


@pytest.mark.parametrize("kept", [0.0, 0.25])
def test_a_validation_without_all_scores_is_a_warning_and_has_no_mean(
    kept: float, caplog: pytest.LogCaptureFixture
) -> None:
    totals = [None, None, None, 5.0] if kept else [None] * 4
    c = replace(config(), reward=replace(config().reward, max_failed=1.0))
    metrics, reward = conclude_validation(c, scored(c, totals), 6)
    assert reward is None and metrics["val/failures"] == sum(total is None for total in totals)
    assert math.isnan(metrics["val/reward/mean"]) and math.isnan(metrics["val/a/mean"])
    assert math.isnan(metrics["val/a/success_rate"])
    assert (metrics["val/b/mean"], metrics["val/c/mean"]) == (7.0, 0.0)  # these are of all prompts
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"step 6: reward on {1 if kept else 0} of 4 held-out prompts" in record.getMessage()
    assert f"{3 if kept else 4} not scored" in record.getMessage()
    assert "scorer a has no score for held-out 'prompt 0': it broke" in record.getMessage()


def test_a_whole_validation_has_its_mean(caplog: pytest.LogCaptureFixture) -> None:
    c, found = config(), scored(config(), [1.0, 3.0, 5.0, 5.0])
    with caplog.at_level("INFO"):
        metrics, reward = conclude_validation(c, found, 6)
    assert reward == metrics["val/reward/mean"] == 3.5 and metrics["val/failures"] == 0
    low, high = (metrics[f"val/a/success_rate_{end}"] for end in ("low", "high"))
    said = f"; a/success_rate 0.750 (95 % interval {low:.3f} to {high:.3f})"
    assert caplog.messages == [f"step 6: reward on 4 held-out prompts 3.500{said}"]
    routed = replace(c.reward, scorers={**c.reward.scorers, "b": ScorerConfig(0, data_sources=["signs"])})
    found.by_scorer["b"] = [None, 7.0, None, None]  # it applies to one of them
    for i, sample in enumerate(found.samples):
        prompt = Prompt(sample.prompt.id, sample.prompt.text, {"data_source": "signs" if i == 1 else "photos"})
        found.samples[i] = replace(sample, prompt=prompt)
    metrics, reward = conclude_validation(replace(c, reward=routed), found, 6)
    assert metrics["val/b/mean"] == 7.0 and reward == 3.5


def test_several_images_per_held_out_prompt_have_the_best_of_them_and_pass_at_k() -> None:
    c, values = config(), [1.0, 3.0, 5.0, 5.0]
    c = replace(c, validation=replace(c.validation, images_per_prompt=2))
    (batch,) = plan_validation(c, PROMPTS[:2], 6)
    columns: dict[str, list[float | None]] = {"a": [v / 2 for v in values]}
    metrics, _ = conclude_validation(c, Scores(batch, list(values), columns, [[]] * 4), 6)
    assert metrics["val/reward/best_of_n"] == 4.0 and metrics["val/a/best_of_n"] == 2.0
    assert metrics["val/a/success_rate"] == metrics["val/a/pass_at_1"] == 0.75 and metrics["val/a/pass_at_2"] == 1.0
    interval = estimate_share([0, 0, 1, 1], [0.0, 1.0, 1.0, 1.0])
    assert (metrics["val/a/success_rate_low"], metrics["val/a/success_rate_high"]) == (interval.low, interval.high)
    failed: dict[str, list[float | None]] = {"a": [None, *columns["a"][1:]]}
    metrics = reward_metrics(
        Scores(batch, [None, *values[1:]], failed, [[ScorerFailure("a", "x")], [], [], []]), c.reward, validation=True
    )
    assert math.isnan(metrics["val/a/pass_at_1"]) and math.isnan(metrics["val/a/best_of_n"])  # no mean without a prompt


@pytest.mark.parametrize("asked", [0, 1])
def test_held_out_prompts_that_only_people_could_score_have_no_reward_and_no_failure(
    asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`asked`: so many of them have another scorer with a weight, by their `data_source`."""
    c, found = config(), Scores()
    (samples,) = plan_validation(c, PROMPTS, 6)
    totals: list[float | None] = [3.0] * asked + [None] * (4 - asked)
    found.add(Scores(samples, totals, {"b": [7.0] * 4}, [[] for _ in totals]))
    with caplog.at_level("INFO"):
        metrics, reward = conclude_validation(c, found, 6)
    expected = {"val/failures": 0.0, "val/b/mean": 7.0} | ({"val/reward/mean": 3.0} if asked else {})
    assert metrics == expected and reward == (3.0 if asked else None)
    said = "reward on 1 held-out prompts 3.000" if asked else "4 held-out prompts are sampled; no scorer with a weight"
    assert len(caplog.messages) == 1 and f"step 6: {said}" in caplog.messages[0]


def test_a_validation_stops_the_run_as_a_step_does() -> None:
    c = config()
    with pytest.raises(
        RewardError, match=r"75% of the held-out images of step 6 .*max_failed=0\.5; .*it broke; .*resume"
    ):
        conclude_validation(c, scored(c, [None, None, None, 5.0]), 6)
    c = replace(c, reward=replace(c.reward, on_error="stop"))
    with pytest.raises(RewardError, match=r"^scorer a has no score for held-out 'prompt 1': .*on_error=drop_group"):
        conclude_validation(c, scored(c, [1.0, 2.0, 3.0, None]), 6)
