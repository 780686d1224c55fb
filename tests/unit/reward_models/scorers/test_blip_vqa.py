import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spacy
import torch
import transformers
from PIL import Image
from tiny_blip import SIZE, WORDS, blip_folder, original_file, spacy_folder
from tiny_clip import assert_scored_alone, pictures

from gerl.errors import RewardError
from reward_models.scorers.blip import BlipVqa, question

PROMPTS = ["a red cat and the blue dog", "the mat", "a cat on the top of a mat"]
PHRASES = [["a red cat", "and the blue dog"], ["the mat"], ["a cat", "on the top", "of a mat"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("blip")
    return {"model": blip_folder(folder / "model"), "spacy_model": spacy_folder(folder / "spacy"), "device": "cpu"}


def published(folder: str, image: Image.Image, asked: list[str]) -> float:
    """The product of the yes of each question in turn, as vqa_prob and BLIP_vqa.py compute it."""
    blip = transformers.BlipForQuestionAnswering.from_pretrained(folder).eval()
    small = np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)) / 255.0
    pixels = (small - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    reward = 1.0
    for text in asked:
        ids = [len(WORDS) + 1, *map(WORDS.index, text.replace("?", " ?").split()), WORDS.index("[SEP]")]
        with torch.no_grad():
            seen = blip.vision_model(torch.tensor(pixels.transpose(2, 0, 1)[None]).float())[0]
            read = blip.text_encoder(torch.tensor([ids]), encoder_hidden_states=seen)[0]
            logits = blip.text_decoder(torch.tensor([[len(WORDS)]]), encoder_hidden_states=read).logits[0, 0]
        probability = torch.softmax(logits, dim=0)
        yes, no = probability[WORDS.index("yes")].item(), probability[WORDS.index("no")].item()
        reward *= yes / (yes + no)
    return reward


def test_the_score_is_the_product_of_the_published_probabilities(folders: dict[str, Any]) -> None:
    images = pictures(3)
    scorer = BlipVqa(**folders, batch_size=4)
    assert [scorer.phrases(prompt) for prompt in PROMPTS] == PHRASES
    expected = [
        published(folders["model"], image, [f"{phrase}?" for phrase in phrases])
        for image, phrases in zip(images, PHRASES, strict=True)
    ]
    assert scorer(images, PROMPTS, [{}] * 3) == pytest.approx(expected, rel=1e-4)
    assert len({round(score, 3) for score in expected}) == 3 and max(expected) < 1


def test_the_authors_own_file_gives_the_same_scores(folders: dict[str, Any], tmp_path: Path) -> None:
    file = original_file(folders["model"], tmp_path / "blip.pth")
    assert any("visual_encoder.blocks.1.attn.qkv" in name for name in torch.load(file)["model"])
    expected = BlipVqa(**folders)(pictures(3), PROMPTS, [{}] * 3)
    original = BlipVqa(**{**folders, "model": file, "tokenizer": folders["model"]})
    assert original(pictures(3), PROMPTS, [{}] * 3) == pytest.approx(expected, rel=1e-5)
    for content, sentence in (({"a": 1}, r"cannot be loaded \(KeyError"), ({"model": {}}, "no answer decoder")):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(RewardError, match=rf"model=.*other\.pth .*{sentence}"):
            BlipVqa(**{**folders, "model": str(tmp_path / "other.pth")})(pictures(1), ["a cat"], [{}])


def test_an_image_scores_alone_as_in_a_batch(folders: dict[str, Any]) -> None:
    assert_scored_alone(BlipVqa(**folders), pictures(3), PROMPTS, 1e-5)  # sums of other lengths


def test_places_are_no_things_and_eight_things_are_enough(folders: dict[str, Any]) -> None:
    scorer = BlipVqa(**folders)
    assert scorer.phrases("top cat the left a top mat") == ["cat", "a top", "mat"]
    assert scorer.phrases("cat " * 10) == ["cat"] * 8
    assert scorer(pictures(1), ["red"], [{}]) == [1.0]  # names nothing


def test_a_question_is_cleaned_as_the_authors_do() -> None:
    assert question("The (red) Cat.") == "the red cat?"
    assert question(" ".join(["cat"] * 60)) == " ".join(["cat"] * 50)


def test_without_a_pipeline_that_parses_it_says_what_to_install(folders: dict[str, Any], tmp_path: Path) -> None:
    for name in ("en_no_such_model", "en/no.such"):
        with pytest.raises(RewardError, match=rf"spacy_model={name} is not installed: run python -m spacy download"):
            BlipVqa(**{**folders, "spacy_model": name})
    (tmp_path / "empty").mkdir()
    broken = BlipVqa(**{**folders, "spacy_model": str(tmp_path / "empty")})
    with pytest.raises(RewardError, match=r"spacy_model=.*empty cannot be loaded .*spaCy pipeline that parses English"):
        broken.phrases("a cat")
    spacy.blank("en").to_disk(tmp_path / "blank")
    blank = BlipVqa(**{**folders, "spacy_model": str(tmp_path / "blank")})
    with pytest.raises(RewardError, match=r"spacy_model=.*blank finds no noun phrases, .*such as en_core_web_sm"):
        blank.phrases("a cat")


def test_weights_of_another_kind_or_with_a_gap_are_refused(folders: dict[str, Any], clip: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"model=.* is a clip model: give a transformers BLIP"):
        BlipVqa(**{**folders, "model": clip})(pictures(1), ["a cat"], [{}])
    model = transformers.BlipForQuestionAnswering.from_pretrained(folders["model"])
    tensors = {k: v for k, v in model.state_dict().items() if "text_decoder.bert.encoder.layer.1" not in k}
    gap = shutil.copytree(folders["model"], tmp_path / "gap")
    model.save_pretrained(gap, state_dict=tensors)
    with pytest.raises(RewardError, match=r"no weights for text_decoder\.bert\.encoder\.layer\.1.* more tensors"):
        BlipVqa(**{**folders, "model": str(gap)})(pictures(1), ["a cat"], [{}])
