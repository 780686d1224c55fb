"""Prompts encoded once: equal to what the pipeline says, with fewer calls of its text encoders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import PreTrainedTokenizerBase

from gerl.config import ModelConfig
from gerl.engine import record
from gerl.model.loading import load_policy
from gerl.model.prompts import (
    PROBE,
    PromptCache,
    Reading,
    cut_prompts,
    folder_of,
    found_layout,
    identity,
    joined,
    keep_readings,
    kept_readings,
    read_answer,
    readings,
    write_answer,
)

CPU = torch.device("cpu")


def drawn(pipe: Any, case: Any, call: dict[str, Any]) -> np.ndarray:
    output, _ = record(pipe, call, generators=tiny.generators(), kernel=case.kernel, probe=False)
    return np.asarray(tiny.output_of(output))


def counted(pipe: Any) -> list[str]:
    """Grows by the name of each text encoder that runs."""
    calls: list[str] = []
    for name, part in pipe.components.items():
        if "text_encoder" in name and isinstance(part, torch.nn.Module):
            part.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("name", tiny.CASES)
def test_a_prompt_is_encoded_once(name: str, guided: bool, tmp_path: Path) -> None:
    case = tiny.CASES[name]
    pipe, call = tiny.build(case), tiny.call_for(case, guided=guided) | {"output_type": "np"}
    stock = drawn(pipe, case, call)
    PromptCache(1.0, tmp_path).attach(pipe)
    calls = counted(pipe)
    first = drawn(pipe, case, call)
    assert np.allclose(first, stock, atol=1e-5)  # alone and in a batch, prompts are rounded differently
    few = call | {"prompt": call["prompt"][:1] * len(call["prompt"])}  # others of the same prompts
    drawn(pipe, case, few)  # which are not padded: how these are put together is found here
    calls.clear()
    assert np.array_equal(drawn(pipe, case, call), first)
    drawn(pipe, case, few)
    assert not calls
    other = tiny.build(case)  # another run
    PromptCache(1.0, tmp_path).attach(other)
    calls = counted(other)
    assert np.array_equal(drawn(other, case, call), first)
    assert not calls


def test_memory_is_bounded() -> None:
    cache = PromptCache(3 * 400 / 1e9)
    for i in range(5):
        cache.keep(str(i), (torch.full((100,), float(i)), None))
    assert cache.bytes == 1200
    assert [key for key in "01234" if cache.find(key) is not None] == ["2", "3", "4"]


def test_answers_are_put_together_as_in_a_batch() -> None:
    def answer(rows: list[int], padded: int | None = None) -> Any:
        longest = padded or max(rows)
        embeds = torch.zeros(len(rows), longest, 2)
        for i, length in enumerate(rows):
            embeds[i, :length] = length
        mask = (embeds[..., 0] > 0).long()
        return {"embeds": embeds, "mask": None if bool(mask.all()) else mask, "ids": torch.zeros(longest, 3)}

    parts = [answer([4]), answer([2])]
    layout = found_layout(answer([4, 2]), parts, CPU)
    assert layout == [0, "mask int64", "shared"]
    made: Any = joined(layout, [answer([1]), answer([3]), answer([3])], CPU, [1, 3, 3])
    expected = answer([1, 3, 3])
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    assert found_layout((torch.zeros(2, 3), 1), [(torch.ones(1, 3), 1)] * 2, CPU) is None  # other values
    assert found_layout((torch.zeros(2, 3), 1), [(torch.zeros(1, 3), 2)] * 2, CPU) is None
    blocks = found_layout(torch.tensor([1, 2, -1, -2]), [torch.tensor([1, -1]), torch.tensor([2, -2])], CPU)
    assert blocks == 0  # negative prompts after all prompts


def test_a_damaged_or_foreign_file_is_none(tmp_path: Path) -> None:
    tree = {"a": (torch.ones(2), [None, 1, "x"])}
    write_answer(tmp_path, "key", tree)
    found: Any = read_answer(tmp_path, "key")
    assert torch.equal(found["a"][0], tree["a"][0]) and found["a"][1] == [None, 1, "x"]
    assert read_answer(tmp_path, "other") is None
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert read_answer(tmp_path, "key") is None
    write_answer(tmp_path, "no file", object())
    write_answer(tmp_path / file.name / "below a file", "key", tree)  # a warning, no error
    assert len(list(tmp_path.iterdir())) == 1


def test_encoders_are_read_when_a_prompt_is_new(tmp_path: Path) -> None:
    case = tiny.CASES["flux"]
    model, cache = tmp_path / "model", tmp_path / "cache"
    tiny.build(case).save_pretrained(model)
    config, call = ModelConfig(path=str(model), lora_rank=2), tiny.call_for(case, guided=False) | {"output_type": "np"}
    images = []
    for _ in range(2):
        pipe = load_policy(config, 0.0, "cpu", 0, late=True).pipe
        PromptCache(1.0, folder_of(cache, config, torch.float32)).attach(pipe)
        images.append(drawn(pipe, case, call))
    assert np.array_equal(*images)
    assert not any("encoder" in pipe.components[name]._modules for name in ("text_encoder", "text_encoder_2"))
    assert sum(p.numel() for p in pipe.text_encoder.parameters()) == 0
    drawn(pipe, case, call | {"prompt": ["new", *call["prompt"][1:]]})
    assert sum(p.numel() for p in pipe.text_encoder.parameters()) > 0
    whole = load_policy(config, 0.0, "cpu", 0).pipe
    PromptCache(1.0).attach(whole)
    assert np.array_equal(drawn(whole, case, call), images[0])


def test_other_weights_have_another_folder(tmp_path: Path) -> None:
    for part in ("text_encoder", "tokenizer"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "file").write_bytes(bytes(10**5))
    before = identity(tmp_path, ("text_encoder", "tokenizer"), torch.float32, "none")
    assert before == identity(tmp_path, ("text_encoder", "tokenizer"), torch.float32, "none")
    assert before != identity(tmp_path, ("text_encoder", "tokenizer"), torch.bfloat16, "none")
    (tmp_path / "text_encoder" / "file").write_bytes(bytes(10**5 - 1) + b"1")
    assert before != identity(tmp_path, ("text_encoder", "tokenizer"), torch.float32, "none")


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
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("[{}]")
    assert kept_readings(tmp_path / "cache") is None
