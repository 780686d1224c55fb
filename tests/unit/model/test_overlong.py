"""Which prompts a pipeline cuts, found by its tokenizers alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import PreTrainedTokenizerBase

from gerl.model.overlong import PROBE, Reading, cut_prompts, keep_readings, kept_readings, readings

# one token per character, and each tokenizer keeps 16 with those that begin and end a text
PROMPTS = ["a" * 14, "a" * 15, "b" * 6, "a" * 600, "é" * 14]


def read(name: str, **more: Any) -> tuple[Any, list[Reading], Mapping[str, object]]:
    pipe, case = tiny.build(tiny.CASES[name]), tiny.CASES[name]
    call = {"prompt": [PROBE], "height": 16, "width": 16, "num_inference_steps": 1} | case.call | more
    denoiser = tiny.denoiser_of(pipe)
    before = PreTrainedTokenizerBase.__call__
    found = readings(pipe, lambda: pipe(**call), call, [denoiser])
    assert PreTrainedTokenizerBase.__call__ is before and not denoiser._forward_pre_hooks
    return pipe, found, call


@pytest.mark.parametrize(
    ("name", "more", "most"),
    [
        ("sd15", {}, {"tokenizer": 14}),
        ("sd3", {}, {"tokenizer": 14, "tokenizer_2": 14, "tokenizer_3": 6}),  # max_sequence_length=8
        ("sd3", {"max_sequence_length": 256}, {"tokenizer": 14, "tokenizer_2": 14, "tokenizer_3": 254}),
        ("flux", {}, {"tokenizer": 14, "tokenizer_2": 6}),
        # cut by the tokenizer at 1024 tokens and its template's, and by the pipeline at 512 of the prompt's
        ("qwen_image", {}, {"tokenizer": 512}),
        ("qwen_image", {"max_sequence_length": 5}, {"tokenizer": 5}),
        ("z_image", {}, {"tokenizer": 504}),  # its template is within the 512
        ("wan", {}, {"tokenizer": 14}),
    ],
)
def test_the_tokens_of_a_prompt_that_are_read(name: str, more: dict[str, Any], most: dict[str, int]) -> None:
    pipe, found, _ = read(name, **more)
    cut = cut_prompts(pipe, found, ["x" * length for length in range(1, 700)])
    assert {part: tokens for part, (tokens, _) in cut.by_tokenizer.items()} == most
    for tokens, indices in cut.by_tokenizer.values():
        assert indices[0] + 1 == tokens + 1, "the first that is one token longer"
    assert cut.tokenizers == len(most) and cut.lost == list(range(max(most.values()), 699))


def test_prompts_that_one_of_two_tokenizers_reads_whole_are_not_lost() -> None:
    pipe, found, _ = read("sd3", max_sequence_length=256)
    cut = cut_prompts(pipe, found, PROMPTS)
    assert cut.by_tokenizer == {"tokenizer": (14, [1, 3]), "tokenizer_2": (14, [1, 3]), "tokenizer_3": (254, [3])}
    assert cut.lost == [3]
    assert cut_prompts(pipe, found, ["short"]).by_tokenizer == {} and cut_prompts(pipe, found, ["short"]).lost == []


def test_readings_are_kept_beside_encoded_prompts(tmp_path: Path) -> None:
    _, found, _ = read("qwen_image")
    assert kept_readings(None) is None and kept_readings(tmp_path / "cache") is None
    keep_readings(tmp_path / "cache", found)
    assert kept_readings(tmp_path / "cache") == found and "user" in found[0].before
    (tmp_path / "cache" / "tokenizers.json").write_text("[{}]")
    assert kept_readings(tmp_path / "cache") is None
