"""The scores of a step, image by image, and their means."""

import math
from dataclasses import replace

from crediting import PROMPTS, config, scored

from gerl.algorithms.planning import plan_samples
from gerl.progress import Stopwatch
from gerl.protocol import ScorerFailure, Scores
from gerl.trainer.step import Step, reward_metrics


def test_each_kind_of_held_out_prompts_has_its_mean() -> None:
    c = config()
    found = scored(c, [1.0, 3.0, 5.0, 6.0])
    assert not [name for name in reward_metrics(found, c.reward, validation=True) if name.count("/") > 2]
    sources = ("signs/short", "signs/short", "photos", None)
    for i, source in enumerate(sources):
        prompt = replace(found.samples[i].prompt, metadata={} if source is None else {"data_source": source})
        found.samples[i] = replace(found.samples[i], prompt=prompt)
    metrics = reward_metrics(found, c.reward, validation=True)
    assert {name: v for name, v in metrics.items() if name.startswith("val/reward/") and name.endswith("/mean")} == {
        "val/reward/mean": 3.75, "val/reward/signs_short/mean": 2.0, "val/reward/photos/mean": 5.0
    }  # fmt: skip
    found.totals[0], found.failures[0] = None, [ScorerFailure("a", "it broke")]
    # a mean of other prompts is not compared
    metrics = reward_metrics(found, c.reward, validation=True)
    assert math.isnan(metrics["val/reward/signs_short/mean"]) and metrics["val/reward/photos/mean"] == 5.0


def test_a_column_that_a_micro_batch_lacks_has_no_values_there() -> None:
    c = config()
    samples = plan_samples(c, PROMPTS, 1, 0)
    found = Scores()
    found.add(Scores(samples[:1], [1.0], {"a": [1.0]}, [[]]))
    found.add(Scores(samples[1:3], [2.0, 3.0], {"a": [2.0, 3.0], "a/detail": [5.0, 7.0]}, [[], []]))
    found.add(Scores(samples[3:4], [None], {"a": [None]}, [[ScorerFailure("a", "it broke")]]))
    assert found.by_scorer == {"a": [1.0, 2.0, 3.0, None], "a/detail": [None, 5.0, 7.0, None]}
    assert reward_metrics(found, c.reward)["reward/a/detail/mean"] == 6.0


def test_a_step_that_is_repeated_begins_anew_unless_its_update_was_taken() -> None:
    step = Step(3, Stopwatch(), scores=scored(config(), [1.0, 3.0]), rounds=2, lag=1, metrics={"a": 1.0})
    step.watch.metrics["timing/rollout_s"] = 2.0
    step.taken = True
    step.restart()
    assert step.rounds == 2 and len(step.scores.samples) == 2 and step.watch.metrics
    step.taken = False
    step.restart()
    assert (step.number, step.rounds, step.lag, step.metrics, step.scores.samples) == (3, 0, 0, {}, [])
    assert not step.watch.metrics
