"""Building any scorer of gerl: kwargs, packages, weights; what it scores is tested beside it."""

import json
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from tiny_clip import pictures
from torchvision_ops import importable_open_clip

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.protocol import Prompt
from gerl.rewards.scorers import SCORERS, Scorer, build_scorer, scorer_class

CHAT = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
SERVICE = {"url": "http://127.0.0.1:8100"}
ASPECTS = {"shape": "Are the shapes right?", "colour": "Are the colours right?"}


def build(name: str, **kwargs: Any) -> Any:
    return build_scorer(name, ScorerConfig(kwargs=kwargs))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vlm_judge", CHAT),
        ("vlm_judge", {**CHAT, "mode": "rubric", "limits": [1, 5], "scale": 5, "aspects": ASPECTS}),
        ("unified_reward", {"base_url": CHAT["base_url"]}),
        ("remote", {**SERVICE, "scorer": "red", "batch_size": 4}),
        ("deqa", SERVICE),
        ("geneval", {"threshold": 0.5}),
        ("unified_reward2", {"base_url": CHAT["base_url"]}),
        ("geneval2", {**CHAT, "mean": "arithmetic"}),
        ("dpg", {**CHAT, "metadata_key": "graph"}),
        ("vlm_judge", {**CHAT, "sources": ["image"]}),
        ("dino_similarity", {"model": "facebook/dinov2-large", "metadata_key": "source"}),
    ],
)
def test_kwargs_as_a_configuration_gives_them_are_taken(name: str, kwargs: dict[str, Any]) -> None:
    given = kwargs | ({"limits": (1.0, 5.0)} if "limits" in kwargs else {})
    assert build(name, **json.loads(json.dumps(kwargs))) == scorer_class(name)(**given)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("ocr", {"thread": 1}, "thread=1 is invalid .*; ocr takes threads, .*match, strict, detect, min_width"),
        ("ocr", {"threads": 0}, "threads=0 is invalid"),
        ("ocr", {"backend": "tesseract"}, "backend='tesseract' is invalid"),
        ("jpeg_compressibility", {"quality": 101}, "quality=101 is invalid.*takes quality"),
        ("sharpness", {"size": 3}, "size=3 is invalid"),
        ("colourfulness", {"size": 3}, "size=3 is invalid"),
        ("clipscore", {"device": "tpu"}, "device='tpu' is invalid"),
        ("clipscore", {"dtype": "int8"}, "dtype='int8' is invalid"),
        ("clipscore", {"batch_size": 0}, "batch_size=0 is invalid"),
        ("clipscore", {"modle": "x"}, "modle='x' is invalid"),
        ("clipscore", {"model": None}, "model=None is invalid"),
        ("geneval", {"threshold": 1.5}, "threshold=1.5 is invalid"),
        ("geneval", {"device": "tpu"}, "device='tpu' is invalid"),
        ("geneval", {"dtype": "int8"}, "dtype='int8' is invalid"),
        ("geneval", {"nms": 1.0}, "nms=1.0 is invalid"),
        ("geneval", {"max_objects": 0}, "max_objects=0 is invalid"),
        ("remote", {**SERVICE, "scorer": "red", "batch_size": 0}, "batch_size=0 is invalid"),
        ("remote", {"url": "host", "scorer": "red"}, "url='host' is not an addr"),
        ("deqa", {**SERVICE, "scorer": "x"}, "scorer='x' is invalid"),
        ("unified_reward", {}, "base_url"),
        ("vlm_judge", {**CHAT, "timeout": 0}, "timeout=0 is invalid"),
        ("vlm_judge", {**CHAT, "concurrency": 0}, "concurrency=0 is invalid"),
        ("vlm_judge", {**CHAT, "retries": -1}, "retries=-1 is invalid"),
        ("vlm_judge", {**CHAT, "token": "x"}, "token='x' is invalid"),
        ("vlm_judge", {**CHAT, "mode": "rubric"}, "mode=rubric has 0 aspects"),
        ("vlm_judge", {**CHAT, "aspects": ASPECTS}, "mode=regex has 2 aspects"),
        ("vlm_judge", {**CHAT, "mode": "rubric", "aspects": {"mean": "?"}}, "aspects.mean: use a name"),
        ("vlm_judge", {**CHAT, "mode": "rubric", "aspects": {"a/b": "?"}}, "aspects.a/b: use a name"),
        ("vlm_judge", {**CHAT, "mode": "rubric", "aspects": ASPECTS, "template": "?"}, r"template has no \{aspects\}"),
        (
            "vlm_judge",
            {**CHAT, "mode": "rubric", "aspects": ASPECTS, "template": "{aspects}", "one_request": False},
            r"template has no \{question\}",
        ),
        ("vlm_judge", {**CHAT, "pattern": "(", "mode": "regex"}, "is not a valid regular expression"),
        ("vlm_judge", {**CHAT, "pattern": r"\d+"}, "has no group"),
        ("vlm_judge", {**CHAT, "limits": [5, 5]}, r"limits=\[5.0, 5.0\]"),
        ("vlm_judge", {**CHAT, "mode": "yes_no", "yes": ["ok"], "no": ["OK."]}, "none for both"),
        ("vlm_judge", {**CHAT, "mode": "yes_no", "yes": []}, "words of letters for each"),
        ("vlm_judge", {**CHAT, "mode": "yes_no", "yes": ["!"]}, "words of letters for each"),
        ("vlm_judge", {**CHAT, "mode": "vote"}, "mode='vote' is invalid"),
        ("vlm_judge", {**CHAT, "scale": 0}, "scale=0 is invalid"),
        ("vlm_judge", {**CHAT, "base_url": "localhost:8000"}, "base_url='localhost:8000' is not an address"),
        ("vlm_judge", {**CHAT, "sources": "image"}, "sources='image' is invalid"),
        ("unified_reward2", {}, "base_url"),
        ("unified_reward2", {**CHAT, "image_size": 0}, "image_size=0 is invalid"),
        ("geneval2", {**CHAT, "mean": "median"}, "mean='median' is invalid"),
        ("geneval2", {**CHAT, "min_mass": 0}, "min_mass=0 is invalid"),
        ("dpg", {**CHAT, "image_size": 0}, "image_size=0 is invalid"),
        ("blip_vqa", {"batch_size": 0}, "batch_size=0 is invalid"),
        ("blip_vqa", {"spacy": "x"}, "spacy='x' is invalid.*takes .*model, tokenizer, spacy_model"),
        ("dino_similarity", {"batch_size": 0}, "batch_size=0 is invalid"),
        ("dino_similarity", {"processor": "x"}, "processor='x' is invalid.*takes .*metadata_key, model"),
        ("aesthetic", {"head": None}, "head=None is invalid"),
        ("hpsv3", {"pixels": 1}, "pixels=1 is invalid"),
        ("videoalign", {"fps": 0}, "fps=0 is invalid.*takes .*model, checkpoint, base, code, fps"),
        (
            "editreward",
            {"reward_dim": "overall"},
            "reward_dim='overall' is invalid.*takes .*model, checkpoint, base, code",
        ),
        ("orc", {}, r"did you mean 'ocr'.*reward\.scorers\.orc\.path"),
    ],
)
def test_wrong_kwargs_are_named_when_the_scorer_is_built(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=rf"reward\.scorers\.{name}.*{message}"):
        build(name, **kwargs)


@pytest.mark.parametrize(
    ("name", "kwargs", "module", "extra"),
    [
        ("ocr", {}, "rapidocr", "ocr"),
        ("ocr", {"backend": "paddleocr"}, "paddle", "paddleocr"),
        ("hpsv2", {}, "open_clip", "clip"),
        ("blip_vqa", {}, "spacy", "compbench"),
    ],
)
def test_a_package_that_is_not_installed_names_its_extra(
    name: str, kwargs: dict[str, Any], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RewardError, match=rf"needs the package {module}, .*pip install 'gerl\[{extra}\]'"):
        build(name, **kwargs)


@pytest.mark.parametrize("name", ["sharpness", "colourfulness", "jpeg_compressibility", "jpeg_incompressibility"])
def test_scorers_of_the_look_alone_take_any_prompt(name: str) -> None:
    build(name).check_prompts([Prompt(0, "a cat")])


@pytest.mark.parametrize(
    ("name", "model", "what"),
    [
        ("clipscore", "openai/clip-vit-large-patch14", "a transformers CLIP model"),
        ("imagereward", "THUDM/ImageReward", "a repository with ImageReward.pt"),
        ("hpsv2", "xswu/HPSv2", "a repository with HPS_v2.1_compressed.pt"),
        ("dino_similarity", "facebook/dinov2-base", "a DINO, DINOv2 or DINOv3 model of transformers"),
        ("aesthetic", "openai/clip-vit-large-patch14", "a transformers CLIP model"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_without_kwargs_the_published_weights_are_looked_for(name: str, model: str, what: str) -> None:
    with importable_open_clip() if name == "hpsv2" else nullcontext():
        scorer = build(name)
        row = [{"image": pictures(1)[0]}]
        scorer.check_prompts([Prompt(0, "anything", row[0])])
        with pytest.raises(RewardError, match=f"^model={model} cannot be loaded .* {what}"):
            scorer(pictures(1), ["anything"], row)


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_of_the_table_is_there(name: str) -> None:
    assert issubclass(scorer_class(name), Scorer)
