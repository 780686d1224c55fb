import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_clip import assert_scored_alone, pictures
from tiny_qwen import PIXELS, head, hidden_of_token, qwen_folder, save_reward_model, whole_model

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.vlm_reward import TOKEN, HpsV3

PROMPTS = ["a cat", "two dogs on a mat", "a cat", "fish {text_prompt} & chips"]
WORDS = """
import no_such_package

INSTRUCTION = "\\nGrade it: {text_prompt}\\n"
prompt_with_special_token = "Grade: <|Reward|>\\n"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kwargs of a tiny HPSv3, its whole model with tokenizer, and its head."""
    folder = tmp_path_factory.mktemp("hpsv3")
    base = qwen_folder(folder / "base")
    model, tokens = whole_model(base, TOKEN)
    grades = head()
    (folder / "dataset").mkdir()
    (folder / "dataset" / "data_collator_qwen.py").write_text(WORDS)
    save_reward_model(folder / "HPSv3.safetensors", model, {"rm_head": grades}, old_names=True)
    kwargs = dict(model=str(folder), base=base, code=str(folder), pixels=PIXELS, device="cpu")
    return kwargs, model, tokens, grades


def test_mean_and_deviation_are_what_the_head_makes_of_the_reward_tokens_state(made: Any) -> None:
    kwargs, model, tokens, grades = made
    images = pictures(4)
    texts = [f"\nGrade it: {prompt}\nGrade: <|Reward|>\n" for prompt in PROMPTS]
    hidden = [hidden_of_token(model, tokens, [image], text, TOKEN) for image, text in zip(images, texts, strict=True)]
    expected = grades(torch.cat(hidden))
    scores = HpsV3(**kwargs, batch_size=3)(images, PROMPTS, [{}] * 4)
    assert list(scores) == ["mu", "sigma"]  # the first is the score
    assert scores["mu"] == pytest.approx(expected[:, 0].tolist(), abs=1e-5)
    assert scores["sigma"] == pytest.approx(expected[:, 1].exp().tolist(), abs=1e-5)
    assert max(scores["mu"]) - min(scores["mu"]) > 1e-2


def test_a_score_depends_on_image_and_prompt_and_on_nothing_else(made: Any) -> None:
    scorer = HpsV3(**made[0])
    assert_scored_alone(lambda *arguments: scorer(*arguments)["mu"], pictures(4), PROMPTS, tolerance=1e-5)


def test_the_names_of_newer_files_mean_the_same(made: Any, tmp_path: Path) -> None:
    kwargs, model, _, grades = made
    save_reward_model(tmp_path / "new.safetensors", model, {"rm_head": grades})
    new = HpsV3(**kwargs | {"model": str(tmp_path), "checkpoint": "new.safetensors"})
    assert new(pictures(2), PROMPTS[:2], [{}] * 2) == HpsV3(**kwargs)(pictures(2), PROMPTS[:2], [{}] * 2)
    assert new.network.heads["rm_head"][0].weight.dtype == torch.float32


def test_half_precision_comes_close_and_the_head_stays_whole(made: Any) -> None:
    exact, half = HpsV3(**made[0]), HpsV3(**made[0], dtype="bfloat16")
    assert half.network.backbone.dtype == torch.bfloat16
    assert half.network.heads["rm_head"][0].weight.dtype == torch.float32
    expected = exact(pictures(2), PROMPTS[:2], [{}] * 2)["mu"]
    assert half(pictures(2), PROMPTS[:2], [{}] * 2)["mu"] == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"language_model\.norm\.weight and 0 more tensors are only in one"),
        ({"model.norm.weight": torch.zeros(3)}, r"language_model\.norm\.weight has the shape \[3\], expected \[16\]"),
        ({"rm_head.3.bias": None}, r"rm_head has 0\.bias, .*expected weight and bias of layers 0, 3, 5"),
        ({"rm_head.0.weight": torch.zeros(8, 5)}, "rm_head takes 5 numbers and the model of base returns 16"),
        (
            {"rm_head.5.weight": torch.zeros(3, 6), "rm_head.5.bias": torch.zeros(3)},
            "head returns 3 numbers, HPSv3's returns 2",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    made: Any, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    kwargs = made[0]
    tensors = safetensors.torch.load_file(Path(kwargs["model"]) / "HPSv3.safetensors")
    changed = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    safetensors.torch.save_file(changed, tmp_path / "HPSv3.safetensors")
    with pytest.raises(RewardError, match=message):
        HpsV3(**kwargs | {"model": str(tmp_path)})(pictures(1), ["a"], [{}])


def test_a_base_of_another_kind_is_refused(made: Any, clip: str) -> None:
    with pytest.raises(RewardError, match=r"base=.* is a clip model: give an instruction-tuned Qwen2-VL"):
        HpsV3(**made[0] | {"base": clip})(pictures(1), ["a"], [{}])


def test_a_prompt_that_the_model_would_take_for_a_mark_is_refused_before_any_work(made: Any) -> None:
    scorer = HpsV3(**made[0])
    with pytest.raises(DataError, match=r"prompt 2: .*contains '<\|Reward\|>', .*remove it"):
        scorer.check_prompts([Prompt(1, "a <b|c>"), Prompt(2, "10 of 10 <|Reward|>")])
    with pytest.raises(DataError, match=r"image_pad"):
        scorer(pictures(1), ["<|image_pad|>"], [{}])


def test_the_words_are_those_of_the_authors_code_which_is_not_run(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {name: value for name, value in made[0].items() if name != "code"}
    with pytest.raises(RewardError, match=r"is missing: run pip install --no-deps hpsv3, or give .* as code"):
        HpsV3(**kwargs)
    package = shutil.copytree(Path(made[0]["code"]) / "dataset", tmp_path / "hpsv3" / "dataset").parent
    (package / "__init__.py").write_text("raise AssertionError('it was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert HpsV3(**kwargs).instructions == HpsV3(**kwargs, code=str(tmp_path)).instructions
    file = package / "dataset" / "data_collator_qwen.py"
    for text, message in [
        ("INSTRUCTION = 'a'", "has no text prompt_with_special_token"),
        ("INSTRUCTION = 'a'\nprompt_with_special_token = 'b'", "must have one"),
        ("INSTRUCTION = (", "cannot be read \\(SyntaxError"),
        (None, "cannot be read \\(FileNotFoundError"),
    ]:
        file.unlink()
        if text is not None:
            file.write_text(text)
        with pytest.raises(RewardError, match=message):
            HpsV3(**kwargs)
        file.touch()
    with pytest.raises(RewardError, match=r"code=/nowhere: there is no such folder"):
        HpsV3(**kwargs, code="/nowhere")


@pytest.mark.usefixtures("hub")
def test_what_cannot_be_downloaded_is_named(made: Any) -> None:
    kwargs = {name: made[0][name] for name in ("code", "device")}
    with pytest.raises(RewardError, match=r"^base=Qwen/Qwen2-VL-7B-Instruct cannot be loaded"):
        HpsV3(**kwargs)(pictures(1), ["a"], [{}])
    with pytest.raises(RewardError, match=re.escape("model=MizzenAI/HPSv3 cannot be loaded")):
        HpsV3(**kwargs, base=made[0]["base"])(pictures(1), ["a"], [{}])
