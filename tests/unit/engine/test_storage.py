"""A trajectory taken apart and put together again is replayed bit for bit."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pretended
import pytest
import replaying
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from PIL import Image
from replaying import EACH, GUIDED

from gerl.engine import RequiredTensors, Tape, Trajectory, compact
from gerl.engine.hidden_states import Features
from gerl.engine.storage import Omitted, restore, store
from gerl.engine.tape import Answer, ComponentCall
from gerl.errors import ReplayError
from gerl.protocol import Prompt, References, RolloutTask, Sample, Segment
from gerl.utils.tensors import pack_tensors, unpack_tensors

TASK = RolloutTask(3, [Sample(Prompt(0, "a", {"n": [1]}), 0, 2**62, 1)], (Segment((2**62,), (0,), (0,), (0,)),), lag=1)


def again(*tapes: Tape, edit: Callable[[Any], Any] = lambda form: form) -> Trajectory:
    """A trajectory of these tapes as JSON and a file, and read again."""
    form, tensors = store(Trajectory(TASK, tapes, 5, 1))
    return restore(edit(json.loads(json.dumps(form, allow_nan=False))), unpack_tensors(pack_tensors(tensors)), "cpu")


@EACH
@GUIDED
def test_the_gradient_of_a_stored_tape_is_that_of_the_tape(name: str, guided: bool) -> None:
    r = replaying.recorded(name, guided)
    steps = frozenset(r.tape.stochastic_steps[:1])
    for tape in (compact(r.tape, RequiredTensors(steps)), compact(r.tape, RequiredTensors(steps, chain=True))):
        found = again(tape)
        assert found.task == TASK and found.policy_version == 5 and found.owner == 1
        (back,) = found.tapes
        assert back.reads == tape.reads and [s.rule for s in back.steps] == [s.rule for s in tape.steps]
        assert [s.x.stride() for s in back.steps] == [s.x.stride() for s in tape.steps]
        for options in ({}, {"index": [2, 0]}):
            (own, *rest), (other, *same) = (
                replaying.gradients(r, t, steps=sorted(steps), **options) for t in (tape, back)
            )
            assert replaying.all_equal(own, other) and rest == same and any(g.any() for g in own)


def test_the_features_of_a_critic_are_stored() -> None:
    for prompt in (torch.ones(1, 3), None):
        (back,) = again(
            Tape({}, 1, features=Features({0: torch.arange(4.0)[None], 2: torch.zeros(1, 4)}, prompt))
        ).tapes
        assert back.features is not None and list(back.features.hidden) == [0, 2]
        assert torch.equal(back.features.hidden[0], torch.arange(4.0)[None])
        assert back.features.prompt is None if prompt is None else torch.equal(back.features.prompt, prompt)


def test_every_kind_of_value_that_a_tape_holds() -> None:
    picture = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    latents = torch.arange(6.0).reshape(2, 3)
    call = {
        "prompt": ["a", "b"], "image": References([picture]), "mask": picture.convert("1"), "size": torch.Size([2, 3]),
        "scale": float("inf"), "none": None, "flag": True, "dtype": torch.bfloat16, "names": frozenset({"b", "a"}),
        "rows": (1, (2.5, "c")), "numbers": np.arange(3.0), "count": np.int64(7), "part": slice(1, None),
        3: {"x": [latents]},
    }  # fmt: skip
    output = Transformer2DModelOutput(sample=latents.t())
    calls = [ComponentCall(0, "transformer", output, ((), {"cache": object(), "x": latents.to("meta")}))]
    tape = Tape(call, 2, answers=[Answer("encode", (latents, latents.bool()))], component_calls=calls)
    (back,) = again(tape).tapes
    assert back.call["image"][0].tobytes() == picture.tobytes() and type(back.call["image"]) is References
    assert back.call["mask"].mode == "1" and np.array_equal(back.call["numbers"], np.arange(3.0))
    plain = ("prompt", "size", "scale", "none", "flag", "dtype", "names", "rows", "count", "part")
    assert {k: back.call[k] for k in plain} == {k: call[k] for k in plain}
    assert back.answers[0].value[0] is back.call[3]["x"][0] and torch.equal(back.answers[0].value[0], latents)
    found = back.component_calls[0]
    assert type(found.output) is Transformer2DModelOutput and found.output.sample.stride() == (1, 3)
    assert found.inputs[1]["cache"] == Omitted("builtins.object") and found.inputs[1]["x"].is_meta


def test_what_has_no_form_is_refused_with_its_place() -> None:
    with pytest.raises(ReplayError, match=r"tapes\[0\]\.call\.image is a builtins\.object"):
        store(Trajectory(TASK, (Tape({"image": object()}, 1),), 0, 0))
    with pytest.raises(ReplayError, match=r"call\.x is a tensor of torch\.complex128"):
        store(Trajectory(TASK, (Tape({"x": torch.ones(1, dtype=torch.complex128)}, 1),), 0, 0))


@pytest.mark.parametrize(
    "form",
    [
        {"output": "subprocess.Popen", "items": []},
        {"output": "diffusers.utils.deprecate", "items": []},
        {"record": "Path", "fields": {}},
        {"record": "Tape", "fields": {"x": 1}},
        {"tensor": "99"},
        {"nothing": []},
        {},
        [],
    ],
)
def test_a_damaged_file_runs_no_code(form: Any) -> None:
    with pytest.raises(ReplayError, match="damaged"):
        again(Tape({}, 1), edit=lambda _: form)


def test_tensors_return_to_the_kind_of_device_that_they_were_on() -> None:
    device = torch.device(pretended.DEVICE)
    latents, ids = torch.arange(6.0).reshape(2, 3), torch.arange(3)
    tape = Tape({"prompt": ["a"]}, 1, answers=[Answer("encode", (latents.to(device), ids, latents.half()))])
    form, tensors = store(Trajectory(TASK, (tape,), 0, 0))
    stored = {name: tensor.cpu() for name, tensor in tensors.items()}
    back = restore(form, stored, device, device.type).tapes[0].answers[0].value
    assert [value.device.type for value in back] == [device.type, "cpu", "cpu"]
    assert torch.equal(back[0].cpu(), latents) and torch.equal(back[1], ids)
    here = restore(form, stored, "cpu", device.type, whole=True).tapes[0].answers[0].value
    assert [value.dtype for value in here] == [torch.float32, torch.int64, torch.float32]
    assert all(value.device.type == "cpu" for value in here)
