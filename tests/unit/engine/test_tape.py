"""The components that a tape shows to be in the denoising loop."""

import pytest

from gerl.engine.tape import ComponentCall, Tape


@pytest.mark.parametrize(
    ("calls", "looped"),
    [
        (["encoder", "transformer"], {"encoder", "transformer"}),  # one step: nobody knows
        (["transformer", "transformer 1"], {"transformer"}),
        (["encoder", "transformer", "transformer 1"], {"transformer"}),
        (["controlnet", "transformer", "controlnet 1", "transformer 1"], {"controlnet", "transformer"}),
        (["encoder", "high noise", "low noise 1", "low noise 2"], {"high noise", "low noise"}),
        ([], set()),
    ],
)
def test_components_of_the_denoising_loop(calls: list[str], looped: set[str]) -> None:
    tape = Tape({}, 1)
    for call in calls:
        name, step = (call[:-2], int(call[-1])) if call[-1].isdigit() else (call, 0)
        tape.component_calls.append(ComponentCall(step, name, None))
    assert tape.looped_components() == looped
