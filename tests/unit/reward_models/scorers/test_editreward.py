from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_clip import pictures
from tiny_qwen import PIXELS, head, hidden_of_token, qwen_folder, save_reward_model, whole_model

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.vlm_reward import TOKEN, EditReward

PROMPTS = ["make it blue", "remove the dog", "make it blue"]
QUESTIONS = """
INSTRUCTION_EDIT_FOLLOWING = "Followed? {text_prompt}"
INSTRUCTION_EDIT_QUALITY = "Good? {text_prompt}"
"""
END = "import no_such_package\nprompt_with_special_token = ' <|Reward|> END'\n"
WORDS = {"prompts.py": QUESTIONS, "data_collator_qwen_edit.py": END}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kwargs of a tiny EditReward, its whole model with tokenizer, and its two heads."""
    folder = tmp_path_factory.mktemp("editreward")
    base = qwen_folder(folder / "base", "qwen2_5_vl")
    model, tokens = whole_model(base, TOKEN)
    heads = [head(), head()]
    (folder / "EditReward" / "dataset").mkdir(parents=True)
    for name, text in WORDS.items():
        (folder / "EditReward" / "dataset" / name).write_text(text)
    save_reward_model(folder / "model.safetensors", model, {f"rm_heads.head_{i}": part for i, part in enumerate(heads)})
    kwargs = dict(model=str(folder), base=base, code=str(folder), pixels=PIXELS, device="cpu")
    return kwargs, model, tokens, heads


def test_each_question_has_its_head_and_their_mean_is_the_score(made: Any, tmp_path: Path) -> None:
    kwargs, model, tokens, heads = made
    images, sources = pictures(3), pictures(3, seed=1)
    expected = []
    for question, grades in zip(("Followed?", "Good?"), heads, strict=True):
        texts = [f"{question} {prompt} <|Reward|> END" for prompt in PROMPTS]
        rows = zip(sources, images, texts, strict=True)
        hidden = [hidden_of_token(model, tokens, [source, image], text, TOKEN) for source, image, text in rows]
        expected.append(grades(torch.cat(hidden)).detach())
    following, quality = expected
    sources[0].save(tmp_path / "0.png")
    metadata: list[Any] = [{"image": str(tmp_path / "0.png")}, {"image": [sources[1]]}, {"image": sources[2]}]
    scores = EditReward(**kwargs, batch_size=2)(images, PROMPTS, metadata)
    assert list(scores) == ["mean", "following", "quality", "sigma"]  # the first is the score
    assert scores["following"] == pytest.approx(following[:, 0].tolist(), abs=1e-5)
    assert scores["quality"] == pytest.approx(quality[:, 0].tolist(), abs=1e-5)
    assert scores["mean"] == pytest.approx(((following + quality) / 2)[:, 0].tolist(), abs=1e-5)
    assert scores["sigma"] == pytest.approx(((following + quality) / 2)[:, 1].exp().tolist(), abs=1e-5)


def test_source_result_and_instruction_count(made: Any) -> None:
    scorer = EditReward(**made[0])
    one, two = pictures(2)
    asked = [(one, "a", two), (two, "a", one), (one, "b", two), (one, "a", one)]
    images, prompts, sources = zip(*asked, strict=True)
    scores = scorer(list(images), list(prompts), [{"image": source} for source in sources])["mean"]
    assert min(abs(score - scores[0]) for score in scores[1:]) > 1e-4  # a batch changes 1e-6


def test_rows_and_code_that_cannot_be_used_are_found_before_any_work(made: Any, tmp_path: Path) -> None:
    scorer = EditReward(**made[0])
    scorer.check_prompts([Prompt(0, "a", {"image": pictures(1)[0]})])
    with pytest.raises(DataError, match=r"prompt 1: 'a' has no reference for the editreward scorer.*'image'"):
        scorer.check_prompts([Prompt(1, "a")])
    with pytest.raises(DataError, match=r"contains '<\|im_end\|>'"):
        scorer.check_prompts([Prompt(1, "a<|im_end|>", {"image": pictures(1)[0]})])
    with pytest.raises(RewardError, match=r"clone github\.com/TIGER-AI-Lab/EditReward, and give its folder as code"):
        EditReward()
    (tmp_path / "dataset").mkdir()
    for name, text in WORDS.items():
        (tmp_path / "dataset" / name).write_text(text.replace("Good? {text_prompt}", "Good?"))
    with pytest.raises(RewardError, match=r"instruction in .* must have one"):
        EditReward(code=str(tmp_path))


def test_a_model_with_one_head_is_refused(made: Any, tmp_path: Path) -> None:
    kwargs, model, _, heads = made
    save_reward_model(tmp_path / "model.safetensors", model, {"rm_head": heads[0]})
    with pytest.raises(RewardError, match=r"has no rm_heads\.head_0"):
        EditReward(**kwargs | {"model": str(tmp_path)})(pictures(1), ["a"], [{"image": pictures(1)[0]}])
