"""What the model is asked in a turn of an episode."""

from pathlib import Path

import numpy as np
import pytest

from gerl.config import from_mapping
from gerl.config.episodes import TurnConfig
from gerl.errors import ConfigError
from gerl.protocol import Prompt, Sample
from gerl.trainer.turns import Turns, request_of

PIXELS = np.zeros((4, 6, 3), np.uint8)


def test_a_request_is_a_template_or_a_function(tmp_path: Path) -> None:
    prompt = Prompt(0, "a sign", {"text": "OPEN"})
    assert request_of(TurnConfig("edit"), 1, False)(prompt, None, {}) == ""
    assert (
        request_of(TurnConfig("edit", "write {text} on {prompt}"), 1, False)(prompt, None, {}) == "write OPEN on a sign"
    )
    assert "a sign" in request_of(TurnConfig("rewrite"), 0, True)(prompt, None, {})
    with pytest.raises(ConfigError, match=r"colour.*prompt, text"):
        request_of(TurnConfig("edit", "{colour}"), 1, False)(prompt, None, {})
    file = tmp_path / "ask.py"
    file.write_text(
        "def ask(prompt, image, scores):\n    return f'{prompt} {image.size} {scores[\"a\"]}'\n"
        "def nothing(prompt):\n    return None\n"
        "def broken(metadata):\n    return metadata['x']\n"
    )
    assert request_of(TurnConfig("edit", f"{file}:ask"), 1, False)(prompt, PIXELS, {"a": 2.0}) == "a sign (6, 4) 2.0"
    for name, said in (("nothing", "return a text"), ("broken", "line 6")):
        with pytest.raises(ConfigError, match=said):
            request_of(TurnConfig("edit", f"{file}:{name}"), 1, False)(prompt, PIXELS, {})
    with pytest.raises(ConfigError, match="has no function missing"):
        request_of(TurnConfig("edit", f"{file}:missing"), 1, False)


def test_a_template_is_checked_with_all_prompts() -> None:
    keys = {"turns": [{"role": "draw"}, {"role": "edit", "request": "in {style}"}], "roles": {"edit": {}}}
    turns = Turns(from_mapping({"episode": keys}))
    turns.check([Prompt(0, "a", {"style": "red"})])
    with pytest.raises(ConfigError, match=r"turns\[1\].request.*'style'.*'b'"):
        turns.check([Prompt(0, "a", {"style": "red"}), Prompt(1, "b")])


def test_a_text_is_what_the_second_turn_is_asked() -> None:
    roles = {"write": {"kind": "text", "model.path": "lm"}}
    turns = Turns(from_mapping({"episode": {"turns": [{"role": "write"}, {"role": "draw"}], "roles": roles}}))
    assert turns.writes and list(turns.of_images) == [1]
    (first,) = turns.first([Prompt(3, "a cat")])
    assert first.turn is not None and first.turn.role == "write" and "a cat" in first.request
    found = turns.rewritten([Sample(first, k, 0, 1) for k in range(2)], ["one", "two"])
    assert [prompt.request for prompt in found] == ["one", "two"]
    assert [(p.text, p.turn.state, p.turn.role) for p in found if p.turn] == [
        ("a cat", 0, "draw"),
        ("a cat", 1, "draw"),
    ]
