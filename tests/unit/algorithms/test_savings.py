"""Every key that saves time has the effect that the table of `gerl.config.configuration` says.

With every algorithm, but for what only depends on how the denoiser is called: there with one of each way.
"""

import dataclasses
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import drills
import numpy as np
import pytest
import torch
import training
from drills import more

from gerl.algorithms import build_algorithm
from gerl.algorithms.base import DownSampledConfig
from gerl.config import Config, keys
from gerl.config.algorithms import algorithm_config
from gerl.config.configuration import SAVINGS, saving_notes
from gerl.config.registry import ALGORITHMS
from gerl.engine import replay
from gerl.errors import ConfigError
from gerl.model.placement import QuantizedRollout, channels_last, compile_blocks, set_attention
from gerl.model.policy import Policy
from gerl.model.prompts import PromptCache
from gerl.workers.rollout import Rollout

ROOT = Path(__file__).resolve().parents[3]
NEEDS: dict[str, dict[str, Any]] = {
    "branch_grpo": {"n": 1, "split_steps": [0, 1]},
    "tempflow_grpo": {"n": 1, "branch_factor": 2},
    "tree_grpo": {"n": 1, "split_steps": [0, 1]},
    "dense_grpo": {"sampling_window_range": [0, 2]},
    "fdfo": {"sampling_kernel": "cps", "sampling_noise_level": 0.045, "sampling_window_range": [0, 2]},
}
WINDOWED = {"sampling_window_range": [0, 2]}  # leaves steps without noise
# of those that differentiate the reward, which go back in the same way, three
GRADIENTS = [name for name in ALGORITHMS if algorithm_config(name).needs.reward_gradient]
NAMES = [name for name in sorted(ALGORITHMS) if name not in GRADIENTS or name in ("draft", "mixed_gradient", "srpo")]
# one for each way of calling the denoiser, which is all that its layout and kernels depend on
CALLING = ("awm", "diffusion_nft", "dgpo", "draft", "flow_grpo", "neighbor_grpo", "opd", "tempflow_grpo")
EACH = pytest.mark.parametrize("name", [name for name in NAMES if drills.sampled(name, CALLING)])


def config(name: str, **keys: Any) -> Config:
    usual = WINDOWED if algorithm_config(name).needs.trajectory else {"sampling_kernel": "ode"}
    return training.config(name, **{"steps": 5, **(NEEDS.get(name) or usual), **keys})


@functools.cache
def shared(blocks: int = 1) -> Policy:
    """One for all that change nothing of it."""
    return training.new_policy(blocks=blocks)


@functools.cache
def plain(name: str, blocks: int = 1) -> "Drawn":
    """Without any saving."""
    return Drawn(config(name), shared(blocks))


def with_keys(c: Config, block: str, **keys: Any) -> Config:
    return replace(c, **{block: replace(getattr(c, block), **keys)})


class Drawn:
    """What a configuration draws, and the gradient of fixed rewards."""

    def __init__(self, c: Config, policy: Policy | None = None, shares: bool = True) -> None:
        self.made = made = training.Training(c, policy or shared())
        if not shares:
            made.rollout = Rollout(made.policy, c.sampling, made.rollout.validation, shares=False)
            found = [(task, *made.rollout.generate(task, made.algorithm)) for task, *_ in made.tasks]
            made.tasks = [(task, pixels, trajectory.tapes) for task, pixels, trajectory in found]
        self.images = np.concatenate([pixels for _, pixels, _ in made.tasks]).astype(float)
        samples = [sample for task, _, _ in made.tasks for sample in task.samples]
        totals = torch.linspace(0, 1, len(samples)).tolist()
        self.credit = made.algorithm.credit(training.rewards(samples, totals))
        self.gradient, self.stats = made.gradient(self.credit)

    def is_like(self, other: "Drawn", limit: float = 1e-3) -> bool:
        """Equal but for rounding."""
        near = np.abs(self.images - other.images).max() <= 1
        return bool(near) and training.relative(self.gradient, other.gradient) < limit

    def deviation(self, drawing: bool = False) -> float:
        """The largest |ratio - 1| on policy of a policy gradient; `drawing`: replayed with the weights that drew."""
        made, found = self.made, [0.0]
        if not made.algorithm.settings.needs.ratio:
            return 0.0

        def note(k: int, step: Any) -> None:
            if step.recorded_log_prob is None:
                return  # a step without noise, through which a reward is differentiated
            found.append(float(made.algorithm.log_ratio(step).abs().max()))

        for task, _, tapes in made.tasks:
            for segment, tape in zip(task.segments, tapes, strict=True):
                if segment.trained and drawing:
                    with made.policy.as_sampler():
                        replay(made.policy.pipe, tape, note, steps=segment.trained, grad=False)
                elif segment.trained:
                    replay(made.policy.pipe, tape, note, steps=segment.trained, grad=False)
        return max(found)


def test_the_table_names_keys_that_there_are() -> None:
    known = dict(keys())
    assert {saving.key for saving in SAVINGS} <= known.keys()
    assert len({saving.key for saving in SAVINGS}) == len(SAVINGS)
    rows = [f"| `{saving.key}={saving.example}` | {saving.effect} | {saving.saves} |" for saving in SAVINGS]
    assert "\n".join(rows) in (ROOT / "docs" / "performance.md").read_text()


@more
@pytest.mark.parametrize("name", CALLING)  # what a prompt is encoded to does not depend on the algorithm
def test_exact(name: str, tmp_path: Path) -> None:
    c = config(name)
    found = []
    for gb, folder, draws in ((0.0, tmp_path, 1), (1.0, tmp_path, 1), (1.0, None, 2)):  # none, disk, memory only
        policy = training.new_policy()
        PromptCache(gb, folder).attach(policy.pipe)
        found += [Drawn(c, policy) for _ in range(draws)]
    assert all(np.array_equal(found[0].images, other.images) for other in found)
    assert all(torch.equal(found[0].gradient, other.gradient) for other in found)
    assert found[0].is_like(plain(name))


@more
@pytest.mark.parametrize("name", CALLING)
def test_rounding(name: str, compiled: Policy) -> None:
    c = config(name)
    if not c.algorithm.needs.tree and name != "neighbor_grpo":
        same = with_keys(c, "sampling", same_init_noise=True)
        assert Drawn(same).is_like(Drawn(same, shares=False))
    last = training.new_policy()
    channels_last(last.pipe)
    assert Drawn(c, last).is_like(plain(name))
    if not c.algorithm.needs.tree:  # whose parts are of many sizes, for each of which it would be compiled anew
        assert Drawn(c, compiled).is_like(plain(name))
    chosen, own = training.new_policy("flux"), training.new_policy("flux")
    set_attention(chosen.denoisers, "_native_math")
    assert Drawn(c, chosen).is_like(Drawn(c, own))  # actor.step_batch: test_step_batch.py


@pytest.fixture(scope="module")
def compiled() -> Policy:
    policy = training.new_policy()
    for denoiser in policy.denoisers.values():
        compile_blocks(denoiser, "eager")
    return policy


@EACH
@pytest.mark.parametrize(
    "given",
    [{"solver": "dpm2"}, {"solver": "dpm2", "compression": 0.5}, {"cache": "first_block", "cache_threshold": 9.0}]
    + [{"cache": "taylorseer"}],
    ids=lambda given: "+".join(f"{k}={v}" for k, v in given.items()),
)
def test_images(name: str, given: dict[str, Any]) -> None:
    c = config(name)
    try:
        cheaper = with_keys(c, "sampling", **given)
    except ConfigError as error:  # a step without noise is trained, the steps have to be comparable, or as they were
        assert name in ("neighbor_grpo", "dense_grpo", *GRADIENTS) or (
            "compression" in given and algorithm_config(name).needs.tree
        )
        assert "sampling." in str(error)
        return
    blocks = 2 if given.get("cache") == "first_block" else 1  # of which it leaves out the others
    drawn = Drawn(cheaper, shared(blocks))
    if not algorithm_config(name).needs.tree:  # of which only the last step has no noise
        assert not np.array_equal(drawn.images, plain(name, blocks).images)
    assert drawn.deviation() == 0.0 and float(drawn.gradient.norm()) > 0


@EACH
def test_policy(name: str) -> None:
    c = config(name)
    try:
        quantised = with_keys(c, "rollout", quantize="int8")
    except ConfigError as error:
        assert algorithm_config(name).needs.trajectory and not algorithm_config(name).needs.ratio, error
        assert str(error).startswith("rollout.quantize=int8: ") and "ratio" in str(error)
        return
    pytest.importorskip("torchao")
    policy = training.new_policy()
    policy.quantized = QuantizedRollout(policy.denoisers, "int8")
    drawn = Drawn(quantised, policy)
    assert not np.array_equal(drawn.images, plain(name).images) and float(drawn.gradient.norm()) > 0
    if algorithm_config(name).needs.ratio:
        assert drawn.deviation() > 1e-6 and drawn.deviation(drawing=True) < 1e-6  # the record is of those that drew


@EACH
def test_gradient(name: str) -> None:
    if algorithm_config(name).needs.trajectory:
        c = config(name, guidance=4.5)
        joint, detached = Drawn(c), Drawn(with_keys(c, "algorithm", cfg="detach_uncond"))
        assert np.array_equal(joint.images, detached.images)
        assert joint.stats.sums == pytest.approx(detached.stats.sums, rel=1e-3, abs=1e-4)
        assert training.relative(detached.gradient, joint.gradient) > 1e-2
    if issubclass(ALGORITHMS[name].config_class, DownSampledConfig):
        c = config(name)
        half = Drawn(with_keys(c, "algorithm", train_share=0.5))
        assert int(half.credit[:, 0].nan_to_num().ne(0).sum()) == len(half.credit) // 2


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"sampling": {"cache": "taylorseer"}, "model": {"compile": "inductor"}}, "sampling.cache"),
        (
            {"sampling": {"cache": "taylorseer"}, "model": {"shard": "all"}, "cluster": {"ranks_per_worker": 2}},
            "sampling.cache",
        ),
        ({"actor": {"step_batch": 2}, "algorithm": {"cfg": "detach_uncond"}}, "actor.step_batch"),
        ({"rollout": {"quantize": "int8"}, "model": {"train": "full"}}, "rollout.quantize"),
        ({"rollout": {"quantize": "int8"}, "model": {"quantize": "int8"}}, "rollout.quantize"),
        ({"rollout": {"quantize": "int8"}, "algorithm": {"cfg": "off"}}, "rollout.quantize"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, dict[str, Any]], key: str) -> None:
    c = config("flow_grpo")
    blocks = {block: replace(getattr(c, block), **values) for block, values in change.items()}
    with pytest.raises(ConfigError, match=rf"^{key}=.*; remove it$"):
        dataclasses.replace(c, **blocks)


def test_a_run_is_told_what_is_approximate() -> None:
    c = config("flow_grpo", sampling_window_size=1)
    assert saving_notes(c) == []
    (said,) = saving_notes(with_keys(c, "sampling", cache="first_block"))
    assert "approximate" in said and "noisy steps are computed in full" in said
    assert "little effect" in saving_notes(with_keys(config("flow_grpo"), "sampling", cache="taylorseer"))[1]
    (said,) = saving_notes(with_keys(c, "rollout", quantize="int8"))
    assert "their ratio corrects" in said
    assert build_algorithm(c).settings is c.algorithm
