"""Prompts encoded once: equal to what the pipeline says, with fewer calls of its text encoders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from gerl.config import ModelConfig
from gerl.engine import record
from gerl.model.loading import load_policy
from gerl.model.prompt_files import identity, read_answer, write_answer
from gerl.model.prompts import PromptCache, folder_of, found_layout, joined

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
    assert layout == {"embeds": 0, "mask": "mask int64", "ids": "shared"}
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
    before = identity(tmp_path, ["text_encoder", "tokenizer"], torch.float32, "none")
    assert before == identity(tmp_path, ["text_encoder", "tokenizer"], torch.float32, "none")
    assert before != identity(tmp_path, ["text_encoder", "tokenizer"], torch.bfloat16, "none")
    (tmp_path / "text_encoder" / "file").write_bytes(bytes(10**5 - 1) + b"1")
    assert before != identity(tmp_path, ["text_encoder", "tokenizer"], torch.float32, "none")
