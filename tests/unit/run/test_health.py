import math
from typing import Any

import pytest

from gerl.run.health import ABSURD_WEIGHT, BLOCK, PATIENCE, Health
from gerl.trainer.update import weights_problem

CONFIG: dict[str, Any] = {
    "reward": {"scorers": {"ocr": {"weight": 1.0}, "size": {"weight": 0.0}, "mine": {"weight": -0.5}}},
    "rollout": {"n": 12},
    "sampling": {"kernel": "ode", "noise_level": 0.7, "same_init_noise": False},
    "algorithm": {"dynamic_sampling": 0, "kl_coef": 0.0},
    "actor": {"lr": 1e-3},
    "model": {"dtype": "float16"},
    "data": {"train": "my.txt"},
}
DIFFERENT = {"ocr": [0.0, 1.0], "mine": [1.0, 2.0], "size": [3.0, 3.0]}


def steps(health: Health, count: int, scores: dict[str, list[float | None]], signal: bool = False) -> list[list[str]]:
    """The sentences that are due at each of the next steps."""
    said = []
    for _ in range(count):
        metrics: dict[str, Any] = health.measure(scores, signal)
        means = {f"reward/{n}/mean": sum(v or 0.0 for v in values) / len(values) for n, values in scores.items()}
        said.append(health.observe({"step": health.last.get("step", 0) + 1, **means, **metrics}))
    return said


def test_a_signal_is_missed_after_some_steps_and_said_again_rarely() -> None:
    health = Health(CONFIG)
    said = steps(health, 100, DIFFERENT)
    assert [i + 1 for i, sentences in enumerate(said) if sentences] == [5, 15, 35, 75]
    assert all(len(sentences) <= 1 for sentences in said)
    (first,) = said[PATIENCE - 1]
    assert "rollout.n=12" in first and "dynamic_sampling" in first and "noise_level" not in first  # there is no noise
    assert health.last["health/no_signal_steps"] == 100
    assert steps(health, 1, DIFFERENT, signal=True) == [[]] and health.last["health/no_signal_steps"] == 0
    assert health.findings["no signal"].step == 100


def test_a_constant_scorer_is_named_where_others_still_differ() -> None:
    health = Health(CONFIG)
    said = steps(health, PATIENCE, DIFFERENT | {"ocr": [0.0, None, 0.0]}, signal=True)
    assert [len(sentences) for sentences in said] == [0] * (PATIENCE - 1) + [1]
    assert "ocr gave 0 to every image" in said[-1][0] and "in quotes" in said[-1][0] and "my.txt" in said[-1][0]
    assert set(health.findings) == {"constant ocr"}  # a scorer that is only watched may be constant


def test_where_all_scorers_are_constant_the_missing_signal_is_not_said_as_well() -> None:
    health = Health(CONFIG)
    steps(health, PATIENCE, {"ocr": [1.0, 1.0], "mine": [0.0, 0.0]})
    assert set(health.findings) == {"constant ocr", "constant mine"}
    assert (
        "harder prompts" in health.findings["constant ocr"].text
        and "quotes" not in health.findings["constant mine"].text
    )


def test_another_constant_is_not_the_same_and_failures_are_no_scores() -> None:
    health = Health(CONFIG)
    steps(health, 3, {"ocr": [1.0, 1.0]})
    steps(health, 1, {"ocr": [0.5, 0.5]})
    assert health.last["health/ocr/constant_steps"] == 1
    assert "health/ocr/constant_steps" not in health.measure({"ocr": [None, None]}, signal=True)


def test_all_it_knows_is_in_the_rows() -> None:
    whole, resumed, rows = Health(CONFIG), Health(CONFIG), list[dict[str, Any]]()
    said = []
    for _ in range(20):
        said += steps(whole, 1, DIFFERENT)
        rows.append(dict(whole.last))
    for row in rows[:7]:
        resumed.observe(row)
    assert steps(resumed, 13, DIFFERENT) == said[7:] and any(said[7:])
    assert resumed.last == whole.last and resumed.findings == whole.findings


def off_policy(step: int, outside: float | None, **more: float) -> dict[str, Any]:
    values = {} if outside is None else {"outside_fraction": outside, "log_ratio_abs": 0.0021, **more}
    return {"step": step, **{f"actor/off_policy/{name}": value for name, value in values.items()}}


@pytest.mark.parametrize(
    ("outside", "kind"),
    [
        ([0.95, 1.0, 0.91, 0.99, 0.92], "clip always binds"),
        ([0.95, 1.0, 0.5, 0.99, 0.92], None),
        ([0.95, 1.0, None, 0.91, None, 0.99, 0.92], "clip always binds"),  # a step without off-policy updates
        ([0.0] * 5, "clip never binds"),
        ([0.0, 0.0, 0.001, 0.0, 0.0], None),
        ([0.0] * 4, None),
        ([None] * 9, None),
    ],
)
def test_a_trust_region_that_does_everything_or_nothing_is_said(outside: list[float | None], kind: str | None) -> None:
    settings = {"clip_low": 1e-4, "clip_high": 2e-4, **CONFIG["algorithm"]}
    health = Health(CONFIG | {"algorithm": settings, "actor": {"lr": 1e-3, "updates_per_step": 2}})
    rows = [off_policy(step, share, clip_range=9.2e-4) for step, share in enumerate(outside, 1)]
    said = [text for row in rows for text in health.observe(row)]
    assert list(health.findings) == ([] if kind is None else [kind]) and len(said) == (kind is not None)
    for text in said:
        assert f"step {len(outside)}: " in text and "0.0021" in text and "the clip range, 0.00092" in text
        remedies = ("actor.lr=0.001", "actor.updates_per_step=1") if "always" in str(kind) else ("updates_per_step=2",)
        assert all(r in text for r in ("algorithm.clip_low=0.0001 and clip_high=0.0002", *remedies))


def test_the_trust_region_of_a_kl_is_its_threshold() -> None:
    health = Health(CONFIG | {"algorithm": {"kl_threshold": 1e-5, **CONFIG["algorithm"]}})
    (text,) = [text for step in range(1, 7) for text in health.observe(off_policy(step, 1.0))]
    assert "outside the threshold" in text and "algorithm.kl_threshold=1e-05" in text


@pytest.mark.parametrize(
    ("means", "falls"),
    [
        ([0.2, 0.8, 0.5, 0.4], True),
        ([0.2, 0.8, 0.5, 0.8], False),  # it came back
        ([0.2, 0.8, 0.799, 0.799], False),  # less than the noise
        ([0.8, 0.4], False),  # one block may be of hard prompts
    ],
)
def test_rewards_that_fall_for_long_are_said(means: list[float], falls: bool) -> None:
    health, said = Health(CONFIG), list[str]()
    for k, mean in enumerate(means):
        for i in range(BLOCK):
            said += health.observe({"step": k * BLOCK + i + 1, "reward/mean": mean + 0.05 * (-1) ** i})
    assert len(said) == falls
    if falls:
        assert "0.4" in said[0] and "0.8 of the 20 to step 40" in said[0] and "actor.lr=0.001" in said[0]


def test_what_is_broken_is_said_with_its_number() -> None:
    health = Health(CONFIG)
    said = health.observe({"step": 3, "health/blank_fraction": 0.5, "actor/lora_max": 11.0})
    assert len(said) == 2 and "50%" in said[0] and "float16" in said[0] and "is 11," in said[1]
    assert health.observe({"step": 4, "health/blank_fraction": 0.4, "actor/lora_max": 9.0}) == []
    assert health.observe({"step": 5, "health/blank_fraction": None, "actor/lora_max": None}) == []


@pytest.mark.parametrize(("rms", "said"), [(3e-10, True), (1e-8, False), (0.0, False), (None, False)])
def test_a_gradient_below_the_epsilon_of_the_optimizer_is_said(rms: float | None, said: bool) -> None:
    health = Health(CONFIG | {"actor": {"lr": 1e-3, "eps": 1e-8}})
    found = health.observe({"step": 1, "actor/grad_rms": rms})
    assert len(found) == said
    if said:
        assert "3e-10" in found[0] and "actor.eps=1e-08" in found[0] and "actor.eps=1e-13" in found[0]


def dominated(config: dict[str, Any], largest: int, count: int = PATIENCE, first: int = 0) -> list[str]:
    """The sentences of so many steps in which nearly all of the gradient is that of denoising step `largest`."""
    health, said = Health(config), list[str]()
    norms = {f"actor/step_grad_norm/{k}": 9.0 if k == largest else 1.0 for k in range(first, 12)}
    for i in range(count):
        said += health.observe({"step": i + 1, "actor/step_grad_share": 0.95, **norms})
    return said


def test_a_gradient_that_is_that_of_one_denoising_step_is_said_after_some_steps() -> None:
    config = CONFIG | {"algorithm": {"timestep_weights": "uniform"}}
    assert dominated(config, 11, PATIENCE - 1) == []
    (said,) = dominated(config, 11)
    assert "denoising step 11 made up 95% of the squared gradient" in said and "signal=4" in said
    assert "timestep_weights=std2_over_jacobian or train" in said and "sampling.window_range=[0,11]" in said
    health = Health(config)
    for i in range(20):  # one step in ten is nothing
        assert not health.observe({"step": i + 1, "actor/step_grad_share": 0.5 if i % 4 else 0.95})


def test_a_reward_that_is_differentiated_may_have_its_gradient_from_one_step() -> None:
    assert dominated(CONFIG | {"algorithm": {"name": "draft"}}, 11) == []
    for name in ("flow_grpo", "mixed_gradient"):
        assert dominated(CONFIG | {"algorithm": {"name": name}}, 11)


def test_what_is_advised_then_takes_nothing_from_the_steps_with_more_noise() -> None:
    best = CONFIG | {"algorithm": {"timestep_weights": "std2_over_jacobian"}, "sampling": {"window_range": [2, 12]}}
    (said,) = dominated(best, 11, first=2)
    assert "timestep_weights" not in said and "sampling.window_range=[2,11]" in said
    (said,) = dominated(CONFIG | {"algorithm": {"timestep_weights": "std"}}, 0)
    assert "timestep_weights" not in said and "window_range" not in said and "signal=4" in said
    tree = CONFIG | {"algorithm": {"split_steps": [0, 3]}, "sampling": {"window_range": None}}
    assert "window_range=[0,4]" in dominated(tree, 4)[0] and "window_range" not in dominated(tree, 3)[0]
    wide = CONFIG | {"algorithm": {}, "sampling": {"window_range": [0, 12], "window_size": 12}}
    assert "window_range" not in dominated(wide, 11)[0]


@pytest.mark.parametrize("largest", [ABSURD_WEIGHT * 2, math.inf, math.nan])
def test_weights_beyond_all_sense_stop_a_run(largest: float) -> None:
    assert "lower actor.lr" in (weights_problem(largest, 1e30) or "")
    assert weights_problem(0.3, 1e-3) is None
