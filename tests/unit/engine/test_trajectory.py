"""Trajectories as values: rows of a tape, lean tapes, and trajectories that are split or sent to another process."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import (
    EACH,
    GUIDED,
    WEIGHTS,
    Recorded,
    all_equal,
    deviation,
    distance,
    gradients,
    largest_deviation,
    own,
    recorded,
    replayed,
    squares,
)
from torch.utils._pytree import tree_leaves

from gerl.engine import Reads, ReplayedStep, Tape, Trajectory, branch, lean, record, replay
from gerl.engine.batching import num_elements, select_call, tensor_bytes
from gerl.errors import ReplayError
from gerl.protocol import Prompt, RolloutTask, Sample, Segment


def outputs(r: Recorded, tape: Tape, **options: Any) -> list[torch.Tensor]:
    """All that a replay without gradient hands out."""
    found: list[torch.Tensor] = []
    for step in replayed(r, tape, **options)[0].values():
        found += [step.x, step.model_output, step.mean]
        if step.x_next is not None and step.recorded_log_prob is not None:
            found += [step.x_next, step.log_prob, step.recorded_log_prob]
    return found


def same_gradients(r: Recorded, one: Tape, other: Tape, **options: Any) -> bool:
    a, b = (gradients(r, tape, **options) for tape in (one, other))
    return a[1:] == b[1:] and all_equal(a[0], b[0])


# --- rows of a tape


@cache
def whole(name: str, guided: bool) -> dict[int, ReplayedStep]:
    return replayed(recorded(name, guided))[0]


@EACH
@GUIDED
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_the_rows_of_a_tape_are_a_tape_of_their_own(name: str, guided: bool, data: st.DataObject) -> None:
    r = recorded(name, guided)
    index = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    part = r.tape.rows(index)
    assert part.batch_size == len(index) and part.call["prompt"] == [tiny.PROMPTS[i] for i in index]
    assert all_equal(outputs(r, part), outputs(r, r.tape, index=index))
    for k, step in replayed(r, part)[0].items():
        expected = whole(name, guided)[k]
        assert step.rule == expected.rule
        for key in ("x", "x_next", "recorded_log_prob", "recorded_mean"):
            assert torch.equal(getattr(step, key), getattr(expected, key)[index])
        torch.testing.assert_close(step.model_output, expected.model_output[index], rtol=1e-4, atol=1e-5)
    # rows of rows are rows: also of one sample, whose probe is of two
    inner = data.draw(st.lists(st.integers(0, len(index) - 1), min_size=1, max_size=3))
    again = part.rows(inner)
    assert all(torch.equal(a.x, b.x[[index[i] for i in inner]]) for a, b in zip(again.steps, r.tape.steps, strict=True))
    assert deviation(r, again) <= 1e-5


@pytest.mark.parametrize(("guided", "cfg"), [(False, "joint"), (True, "joint"), (True, "detach_uncond"), (True, "off")])
@EACH
def test_the_gradients_of_the_parts_add_up_to_those_of_the_whole(name: str, guided: bool, cfg: str) -> None:
    r = recorded(name, guided)

    def train(tape: Tape, samples: list[int], **options: Any) -> tuple[dict[int, ReplayedStep], list[torch.Tensor]]:
        def loss(step: ReplayedStep) -> torch.Tensor:
            return (WEIGHTS[samples] * step.log_prob).sum()

        return replayed(r, tape, loss, steps=[0, 2], cfg=cfg, **options)

    steps, full = train(r.tape, [0, 1, 2, 3])
    parts = []
    for samples in ([2, 0], [3], [1]):  # with two samples Z-Image has as many rows as channels
        found, grads = train(r.tape, samples, index=samples)
        assert list(found) == [0, 2] and (cfg == "off" or largest_deviation(found) <= 1e-5)
        for k, step in found.items():
            torch.testing.assert_close(step.model_output, steps[k].model_output[samples], rtol=1e-4, atol=1e-5)
        assert all_equal(train(r.tape.rows(samples), samples)[1], grads)
        parts.append(grads)
    assert distance([sum(g) for g in zip(*parts, strict=True)], full) < 2e-4
    assert distance(parts[0], full) > 1e-2


def test_latents_that_steps_share_stay_shared() -> None:
    tape = recorded("sd3", True).tape.rows([3, 1])
    assert all(a.x_next is b.x for a, b in zip(tape.steps, tape.steps[1:], strict=False))
    kept = lean(tape, Reads(frozenset({1, 2})))
    assert kept.steps[0].x_next is kept.steps[1].x is tape.steps[1].x


def test_a_row_of_a_tape_is_branched_and_replayed() -> None:
    r = recorded("qwen_image", True)
    one = r.tape.rows([2])
    assert one.probe is not None and one.probe.batch_size == 2
    _, tape = r.branch(one, 1, [0, 0, 0], window=[1], generators=tiny.generators(3))
    _, twin = r.branch(r.tape, 1, [2, 2, 2], window=[1], generators=tiny.generators(3))
    assert tape.probe is not None and tape.probe.batch_size == 1
    for a, b in zip(tape.steps, twin.steps, strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.x_next, b.x_next)
    assert same_gradients(r, tape.rows([0, 1, 2]), tape, index=[2, 0])


def test_without_a_probe_there_are_no_rows() -> None:
    r = recorded("sd3", False)
    bare = replace(r.tape, probe=None)
    assert bare.rows(range(4)) is bare
    with pytest.raises(ReplayError, match="probe=True"):
        bare.rows([0, 1])
    _, one = record(r.pipe, select_call(r.call, [0]))
    with pytest.raises(ReplayError, match="probe=True"):
        one.rows([0, 0])


# --- lean tapes


def held(tape: Tape) -> int:
    return Trajectory(RolloutTask(0, [], ()), (tape,), 0, 0).nbytes


@EACH
@GUIDED
@settings(max_examples=3, deadline=None)
@given(steps=st.sets(st.integers(0, 2), min_size=1), means=st.booleans())
def test_a_lean_tape_replays_as_the_whole_one(name: str, guided: bool, steps: set[int], means: bool) -> None:
    r = recorded(name, guided)
    kept = lean(r.tape, Reads(frozenset(steps), means=means, outputs=False))
    assert all_equal(outputs(r, kept, steps=steps), outputs(r, r.tape, steps=steps))
    assert same_gradients(r, kept, r.tape, steps=steps)
    assert held(kept) < held(r.tape)
    first = {"steps": sorted(steps)[:1], "index": [2, 0]}
    assert all_equal(outputs(r, kept, **first), outputs(r, r.tape, **first))


def noise(r: Recorded, steps: Sequence[int]) -> dict[int, torch.Tensor]:
    """Latents for `steps` that were not recorded."""
    shape = r.tape.steps[0].x.shape
    return {k: torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k in steps}


def on_forward(r: Recorded, tape: Tape, latents: dict[int, torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Model outputs at the given latents, and gradients of their squares."""
    steps, grads = replayed(r, tape, squares, steps=latents.keys(), latents=latents, **options)
    return [step.model_output for step in steps.values()] + grads


@EACH
@pytest.mark.parametrize("steps", [s for n in (1, 2, 4) for s in combinations(range(4), n)])
def test_a_lean_tape_of_noised_clean_latents(name: str, steps: tuple[int, ...]) -> None:
    r = recorded(name, True)
    kept = lean(r.tape, Reads(frozenset(steps), means=False, outputs=False, forward=True))
    assert kept.steps[-1].x_next is r.tape.steps[-1].x_next and held(kept) < held(r.tape)
    assert all_equal(on_forward(r, kept, noise(r, steps)), on_forward(r, r.tape, noise(r, steps)))


@EACH
def test_a_lean_tape_may_keep_the_finished_latents_besides_those_of_its_steps(name: str) -> None:
    r = recorded(name, True)
    with_them, without = (
        lean(r.tape, Reads(frozenset({1}), outputs=False, finished=finished)) for finished in (True, False)
    )
    assert with_them.steps[-1].x_next is r.tape.steps[-1].x_next and without.steps[-1].x_next.is_meta
    assert all_equal(outputs(r, with_them, steps=[1]), outputs(r, r.tape, steps=[1]))
    assert held(without) < held(with_them) < held(r.tape)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("cfg", ["detach_uncond", "off"])
@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_a_lean_tape_for_guidance_keeps_the_outputs_that_tell_its_roles(name: str, cfg: str, forward: bool) -> None:
    whole, r = recorded(name, True).tape, own(name)  # a pipeline of which the roles are not known yet
    r.tape = whole
    kept = lean(whole, Reads(frozenset({1, 2}), means=False, forward=forward))
    latents = noise(r, (1, 2)) if forward else {k: whole.steps[k].x for k in (1, 2)}
    assert all_equal(on_forward(r, kept, latents, cfg=cfg), on_forward(r, whole, latents, cfg=cfg))
    assert forward or same_gradients(r, kept, whole, steps=[1, 2], cfg=cfg)


def test_what_a_lean_tape_does_not_have_is_an_error() -> None:
    r = recorded("sd3", True)
    kept = lean(r.tape, Reads(frozenset({1, 2}), means=False, outputs=False))
    for steps in ([2], [0], [0, 1, 2], [3]):
        with pytest.raises(ReplayError, match=r"the lean tape was kept for steps \[1, 2\]"):
            outputs(r, kept, steps=steps)
    with pytest.raises(ReplayError, match="cfg off reads recorded outputs"):
        outputs(r, kept, steps=[1, 2], cfg="off")
    with pytest.raises(ReplayError, match="reads_means"):
        replay(r.pipe, kept, lambda k, step: step.recorded_mean, steps=[1], grad=False)
    with pytest.raises(ReplayError, match="a lean tape cannot be branched"):
        branch(r.pipe, kept, 1, range(4), kernel=r.kernel)
    forward = lean(r.tape, Reads(frozenset({1, 2}), outputs=False, forward=True))
    with pytest.raises(ReplayError, match="pass them as latents"):
        outputs(r, forward, steps=[1, 2])
    beyond = lean(r.tape, Reads(frozenset({1, 7})))  # a configuration for more steps than the pipeline takes
    with pytest.raises(ReplayError, match=r"steps \[1, 7\] cannot be replayed: the tape has 4 steps"):
        outputs(r, beyond, steps=[1, 7])
    with pytest.raises(ReplayError, match="called none of its components in the denoising loop"):
        outputs(r, lean(replace(r.tape, component_calls=[]), Reads(frozenset({1}))), steps=[1])
    nothing = lean(r.tape, Reads(frozenset()))
    assert sum(num_elements([s.x, s.x_next, s.mean]) for s in nothing.steps) > 0
    assert held(nothing) == tensor_bytes([s.log_prob for s in nothing.steps])


def test_a_lean_tape_keeps_what_it_should_and_no_more() -> None:
    r = recorded("sd3", True)
    assert len(r.tape.steps) == 4

    def values(tape: Tape) -> list[set[str]]:
        tensors = [{"x": s.x, "x_next": s.x_next, "mean": s.mean} for s in tape.steps]
        return [{name for name, v in step.items() if v is not None and not v.is_meta} for step in tensors]

    kept = lean(r.tape, Reads(frozenset({1}), means=True, outputs=False))
    assert values(kept) == [{"x", "x_next"}, {"x", "x_next", "mean"}, set(), set()]
    assert [tree_leaves(c.output)[0].is_meta for c in kept.component_calls] == [False, True, True, True]
    forward = lean(r.tape, Reads(frozenset({1, 3}), outputs=False, forward=True))
    # x_next of step 0 is given, that of step 3 is the image's
    assert values(forward) == [{"x"}, {"x_next"}, {"x"}, {"x_next"}]


# --- trajectories


def trajectory(r: Recorded, steps: Sequence[int] = (0, 1)) -> Trajectory:
    samples = [Sample(Prompt(i, text), 0, 10 + i, 1) for i, text in enumerate(tiny.PROMPTS)]
    segment = Segment(tuple(s.seed for s in samples), tuple(range(4)), (0, 1, 2), tuple(steps))
    kept = lean(r.tape, Reads(frozenset(steps), means=False, outputs=False))
    return Trajectory(RolloutTask(7, samples, (segment,)), (kept,), policy_version=3, owner=1)


@given(index=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
@settings(max_examples=10, deadline=None)
def test_a_trajectory_is_split_by_samples(index: list[int]) -> None:
    r = recorded("flux", False)
    whole = trajectory(r)
    part = whole.rows(index)
    assert (part.task.id, part.policy_version, part.owner) == (7, 3, 1)
    assert [s.prompt.id for s in part.task.samples] == index
    (segment,), (tape,) = part.task.segments, part.tapes
    assert segment.seeds == tuple(10 + i for i in index) and segment.leaves == tuple(range(len(index)))
    assert (segment.window, segment.trained) == ((0, 1, 2), (0, 1))
    expected = outputs(r, whole.tapes[0], steps=segment.trained, index=index)
    assert all_equal(outputs(r, tape, steps=segment.trained), expected)
    assert part.nbytes == whole.nbytes * len(index) // 4 or len(index) < 4  # nothing is held twice
    assert whole.rows(range(4)).nbytes == whole.nbytes > part.rows([0]).nbytes - 1


def test_a_tree_cannot_be_split() -> None:
    whole = trajectory(recorded("flux", False))
    (trunk,) = whole.task.segments
    segments = (trunk, replace(trunk, parent=0, rows=tuple(range(len(trunk.seeds)))))
    tree = replace(whole, task=replace(whole.task, segments=segments), tapes=whole.tapes * 2)
    with pytest.raises(ReplayError, match="task 7 is a tree"):
        tree.rows([0])
    assert tree.nbytes == whole.nbytes  # what segments share is counted once


def replay_elsewhere(folder: Path) -> None:
    """Run by another process: replays the trajectories in `folder` and writes the results beside them."""
    for file in folder.glob("*.pkl"):
        sent = pickle.loads(file.read_bytes())
        train = partial(gradients, own(file.stem), sent.tapes[0], steps=sent.task.segments[0].trained)
        torch.save([train(), train(index=[2, 0])], file.with_suffix(".pt"))


def test_trajectories_are_replayed_in_another_process(tmp_path: Path) -> None:
    sent = {name: trajectory(recorded(name, True), (0, 2)) for name in ("sd3", "z_image")}
    for name, value in sent.items():
        file = tmp_path / f"{name}.pkl"
        file.write_bytes(pickle.dumps(value))
        assert file.stat().st_size < 1.3 * value.nbytes + 60_000  # shared latents are sent once
    code = f"import test_trajectory, pathlib; test_trajectory.replay_elsewhere(pathlib.Path({str(tmp_path)!r}))"
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), str(here.parents[2])]
    script = f"import sys; sys.path[:0] = {paths!r}; import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    subprocess.run([sys.executable, "-c", script + code], check=True, timeout=300)
    for name, value in sent.items():
        results = torch.load(tmp_path / f"{name}.pt")
        for options, (grads, *rest) in zip(({}, {"index": [2, 0]}), results, strict=True):
            found = gradients(recorded(name, True), value.tapes[0], steps=[0, 2], **options)
            assert all_equal(found[0], grads) and list(found[1:]) == rest
