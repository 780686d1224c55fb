"""The judge of benchmarks/shapes_scorer.py, and prompts, training and experiment of benchmarks/shapes_model.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import shapes_model
import shapes_scorer
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from gerl.commandline.composition import compose_run


def prompts(name: str) -> list[str]:
    return (shapes_model.HERE / name).read_text().splitlines()


def rendered(lines: list[str]) -> list[Image.Image]:
    rng = np.random.default_rng(7)
    return [shapes_model.render(list(shapes_scorer.things_asked(line).elements()), rng) for line in lines]


def test_the_judge_finds_what_is_drawn() -> None:
    lines = prompts("shapes_train.txt")
    images, others = rendered(lines), lines[1:] + lines[:1]
    metadata = [{}] * len(lines)
    scores = shapes_scorer.matches(images, lines, metadata)
    assert np.mean(scores["matches"]) >= 0.97 and np.mean(scores["exact"]) >= 0.97
    scores = shapes_scorer.matches(images, others, metadata)
    assert np.mean(scores["matches"]) <= 0.15 and np.mean(scores["exact"]) <= 0.02


def test_examples_show_what_their_prompts_ask_for(tmp_path: Path) -> None:
    shapes_model.main([str(tmp_path), "--stages", "examples"])
    rows = [json.loads(line) for line in (tmp_path / "examples.jsonl").read_text().splitlines()]
    images = [Image.open(tmp_path / row["image"]) for row in rows]
    assert np.mean(shapes_scorer.matches(images, [row["prompt"] for row in rows], [])["matches"]) >= 0.97
    chances = shapes_scorer.chance(images, [], [])
    assert chances == shapes_scorer.chance(images, [], []) and abs(np.mean(chances) - 0.5) < 0.06


@pytest.mark.parametrize(
    ("prompt", "score"),
    [
        ("two red circles and a blue square", 1),
        ("a blue square and two red circles", 1),
        ("two red circles", 2 / 3),  # a square that was not asked for
        ("three red circles", 2 / 3),
        ("three red circles, two blue squares and a green triangle", 3 / 6),
        ("a red square and two blue circles", 0),
    ],
)
def test_the_score_is_the_share_of_what_is_asked_less_what_is_not(prompt: str, score: float) -> None:
    image = shapes_model.render([("red", "circle")] * 2 + [("blue", "square")], np.random.default_rng(0))
    scores = shapes_scorer.matches([image], [prompt], [{}])
    assert scores == {"matches": [pytest.approx(score)], "exact": [float(score == 1)]}


def test_a_patch_that_is_no_shape_counts_as_not_asked_for() -> None:
    image = shapes_model.render([("red", "circle")], np.random.default_rng(0))
    image.paste(shapes_scorer.COLOURS["red"], (0, 0, 48, 4))
    assert shapes_scorer.matches([image], ["a red circle"], [{}])["matches"] == [0.5]
    for colour in ((255, 255, 255), shapes_scorer.GROUND, shapes_scorer.COLOURS["red"]):
        assert shapes_scorer.matches([Image.new("RGB", (48, 48), colour)], ["a red circle"], [{}])["matches"] == [0]


def test_a_prompt_without_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match='the prompt "a dog" names no shape: write for example'):
        shapes_scorer.things_asked("a dog")


def test_no_two_prompts_ask_for_the_same_and_the_model_is_not_trained_on_those_held_out() -> None:
    train, held_out = prompts("shapes_train.txt"), prompts("shapes_val.txt")
    asked = [frozenset(shapes_scorer.things_asked(line).items()) for line in train + held_out]
    assert (len(train), len(held_out)) == (300, 96) and len(set(asked)) == len(asked)
    drawn = shapes_model.scenes(np.random.default_rng(1), 2000)
    seen = {frozenset(shapes_scorer.things_asked(shapes_model.prompt_of(things)).items()) for things in drawn}
    assert not seen & set(asked[300:]) and len(seen & set(asked[:300])) > 100


def test_the_tokenizer_knows_every_word_and_cuts_no_prompt() -> None:
    tokenizer = shapes_model.build_tokenizer()
    for line in prompts("shapes_train.txt") + prompts("shapes_val.txt"):
        ids = tokenizer(line, padding="max_length", truncation=True).input_ids
        assert len(ids) == shapes_model.PROMPT_LENGTH and ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
    unknown = tokenizer("a  RED dog").input_ids
    assert tokenizer.convert_ids_to_tokens(unknown)[1:4] == ["a", "red", "<|unknown|>"]


def test_training_goes_on_where_it_was_interrupted_and_saves_a_stock_pipeline(tmp_path: Path) -> None:
    small = ["--images=300", "--vae-steps=2"]
    shapes_model.main([str(tmp_path / "once"), *small, "--steps=2"])
    shapes_model.main([str(tmp_path / "twice"), *small, "--steps=1", "--stages", "vae", "denoiser"])
    shapes_model.main([str(tmp_path / "twice"), *small, "--steps=2", "--stages", "vae", "denoiser"])
    once, twice = (torch.load(tmp_path / name / "work" / "denoiser.pt") for name in ("once", "twice"))
    assert all(torch.equal(once["model"][name], value) for name, value in twice["model"].items())
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "once")
    image = pipe("two red circles", num_inference_steps=2, guidance_scale=1.0).images[0]
    assert image.size == (shapes_model.SIZE, shapes_model.SIZE)
    assert (
        pipe.scheduler.config.prediction_type == "epsilon" and (tmp_path / "once" / "work" / "held_out.png").is_file()
    )


def test_the_experiment_composes() -> None:
    config = compose_run(["experiment=benchmarks/shapes.yaml"]).config
    assert set(config.reward.scorers) == {"matches"} and config.sampling.guidance_scale == 1
