"""Episodes as the page shows them: each group below the image or text that it starts from."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gerl.cluster import Pending
from gerl.config import from_mapping
from gerl.progress import Stopwatch
from gerl.protocol import Images, Prompt, Sample, Scores, Turn
from gerl.run.live import episode_steps, live_steps
from gerl.trainer.extensions.episode_images import EpisodeImages, arranged, episode_sheet
from gerl.trainer.step import Step

EDITED = {
    "turns": [{"role": "draw"}, {"role": "edit", "images": 2}],
    "roles": {"edit": {"pipeline": "StableDiffusion3Img2ImgPipeline"}},
}
WRITTEN = {
    "turns": [{"role": "rewrite", "images": 2}, {"role": "draw"}],
    "roles": {"rewrite": {"kind": "text", "model.path": "x"}},
}


def grey(level: int) -> np.ndarray:
    return np.full((4, 12, 3), level, np.uint8)


def drawn(prompt: int, index: int) -> Sample:
    return Sample(Prompt(prompt, f"p{prompt}", turn=Turn(0, "draw")), index, 0, 1, turn=0, role="draw")


def edit(prompt: int, index: int, start: np.ndarray, state: int, turn: int = 1) -> Sample:
    where = Turn(turn, "edit", "bolder", start, state)
    return Sample(Prompt(prompt, f"p{prompt}", turn=where), index, 0, 1, turn=turn, role="edit", branch=state)


def painted(prompt: int, index: int, text: str, state: int) -> Sample:
    where = Turn(1, "draw", text, None, state)
    return Sample(Prompt(prompt, f"p{prompt}", turn=where), index, 0, 1, turn=1, role="draw", branch=state)


def written(prompt: int, index: int) -> Sample:
    return Sample(
        Prompt(prompt, f"p{prompt}", turn=Turn(0, "rewrite", "Describe")), index, 0, 1, turn=0, role="rewrite"
    )


def table(samples: list[Sample], totals: list[float | None] | None = None) -> Scores:
    totals = totals or [0.1 * i for i in range(len(samples))]
    return Scores(samples, totals, {"a": list(totals)}, [[] for _ in samples])


def pairs(turns: list[Any]) -> list[Any]:
    return [[role, start] for _, role, _, start in turns]


def test_the_edits_follow_the_image_that_they_start_from() -> None:
    pixels = [grey(10 * i) for i in range(8)]
    samples = [drawn(p, k) for p in (0, 1) for k in range(2)]
    samples += [edit(p, k, pixels[2 * p + 1], 0) for p in (0, 1) for k in range(2)]  # of the second image of each
    credit = torch.tensor([[float(i), torch.nan] for i in range(7)] + [[torch.nan, torch.nan]])
    values, shown = arranged(table(samples), pixels, credit)
    assert values["prompts"] == ["p0", "p0", "p1", "p1"]
    assert values["turns"] == [[0, "draw", "", None], [1, "edit", "bolder", 1]] + [
        [0, "draw", "", None],
        [1, "edit", "bolder", 5],
    ]
    assert [int(image[0, 0, 0]) // 10 for image in shown] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert values["images"][1] == [0, 1, 0.1, 1.0, {"a": 0.1}] and values["images"][-1][3] is None


def test_each_image_goes_on_also_where_two_are_equal() -> None:
    pixels = [grey(5)] * 2 + [grey(level) for level in range(10, 16)]
    samples = [drawn(0, 0), drawn(0, 1), edit(0, 0, pixels[0], 0), edit(0, 0, pixels[1], 1)]
    samples += [edit(0, 0, pixels[2], 0, turn=2), edit(0, 0, pixels[3], 1, turn=2)]
    values, shown = arranged(table(samples), pixels)
    # the first image, what became of it, and then the second one
    assert pairs(values["turns"]) == [["draw", None], ["edit", 0], ["edit", 2], ["edit", 1], ["edit", 4]]
    assert [int(image[0, 0, 0]) for image in shown] == [5, 5, 10, 12, 11, 13]


def test_texts_stand_before_their_images_and_have_none() -> None:
    texts = ["<b>a red sign</b>", "p0"]
    samples = [painted(0, k, text, state) for state, text in enumerate(texts) for k in range(2)]
    values, shown = arranged(table([*samples, written(0, 0), written(0, 1)]), [grey(i) for i in range(4)])
    assert values["turns"] == [[0, "rewrite", "", None], [1, "draw", texts[0], 0], [1, "draw", "", 1]]
    assert [image[5:] for image in values["images"]] == [[texts[0]], [texts[1]], [], [], [], []]
    assert [image[1] for image in values["images"]] == [0, 1, 0, 1, 0, 1] and len(shown) == 4


def test_whole_episodes_are_shown_as_far_as_there_is_room() -> None:
    start = [grey(1)]
    scores = table([drawn(p, k) for p in range(3) for k in range(30)] + [edit(p, 0, *start, 0) for p in range(3)])
    values, shown = arranged(scores, start * len(scores.samples))
    assert set(values["prompts"]) == {"p0", "p1"} and len(shown) == 62
    values, shown = arranged(table([drawn(0, k) for k in range(99)]), start * 99)
    assert len(shown) == len(values["images"]) == 64
    values, shown = arranged(scores, start * len(scores.samples), prompts=[2])
    assert set(values["prompts"]) == {"p2"} and len(shown) == 31


def run_of(folder: Path, episode: dict[str, Any], **keys: Any) -> tuple[Any, EpisodeImages]:
    config = from_mapping({"episode": episode, "trainer": {"steps": 9}, **keys})
    found = dict[str, Any]()
    run = SimpleNamespace(config=config, run_dir=folder, plan=SimpleNamespace(last_step=9), found=found)
    run.picture = lambda step, name, image: found.setdefault(name, image)
    return run, EpisodeImages(config)


def pending(pixels: list[np.ndarray]) -> list[Any]:
    return [Pending("worker", value=Images(0, np.stack(pixels), 0.0))]


def validated(run: Any, extension: EpisodeImages, step: int, rounds: list[tuple[Scores, list[np.ndarray]]]) -> Any:
    for scores, pixels in rounds:
        assert extension.continued(run, Step(step, Stopwatch()), scores, pending(pixels)) is None
    return json.loads((run.run_dir / "validation" / f"episode_{step:06d}.json").read_text())


def test_the_turns_of_a_validation_are_saved_together(tmp_path: Path) -> None:
    run, extension = run_of(tmp_path, EDITED)
    first, second = [grey(10 * p) for p in range(3)], [grey(100 + p) for p in range(3)]
    rounds = [
        (table([drawn(p, 0) for p in range(3)], [0.0, None, 0.2]), first),
        (table([edit(p, 0, first[p], 0) for p in range(3)]), second),
    ]
    found = validated(run, extension, 5, rounds)
    assert found["step"] == 5 and "of" not in found and found["prompts"] == [f"p{p}" for p in (0, 0, 1, 1, 2, 2)]
    assert pairs(found["turns"]) == [
        ["draw", None],
        ["edit", 0],
        ["draw", None],
        ["edit", 2],
        ["draw", None],
        ["edit", 4],
    ]
    assert [image[2] for image in found["images"]] == [0.0, 0.0, None, 0.1, 0.2, 0.2]
    assert list(run.found) == ["validation_episode"] and episode_steps(tmp_path) == [5]


def test_a_rewritten_held_out_prompt_has_its_text(tmp_path: Path) -> None:
    run, extension = run_of(tmp_path, WRITTEN)
    images = table([painted(p, 0, f"text {p}", 0) for p in range(2)])
    found = validated(run, extension, 0, [(images, [grey(1), grey(2)])])
    assert pairs(found["turns"]) == [["rewrite", None], ["draw", 0], ["rewrite", None], ["draw", 2]]
    assert [image[2:] for image in found["images"]][::2] == [[None, None, {"a": None}, f"text {p}"] for p in range(2)]


@pytest.mark.parametrize("images", [2, None])
def test_as_many_held_out_episodes_are_saved_as_images(images: int | None, tmp_path: Path) -> None:
    run, extension = run_of(tmp_path, EDITED, validation={"images": images})
    first = [grey(p) for p in range(40)]
    rounds = [
        (table([drawn(p, 0) for p in range(40)]), first),
        (table([edit(p, 0, first[p], 0) for p in range(40)]), first),
    ]
    found = validated(run, extension, 1, rounds)
    assert len(found["images"]) == 2 * (images or 16)


def test_episodes_are_deleted_with_the_images_of_their_validation(tmp_path: Path) -> None:
    run, extension = run_of(tmp_path, EDITED)
    rounds = [(table([drawn(0, 0)]), [grey(1)]), (table([edit(0, 0, grey(1), 0)]), [grey(2)])]
    for step in range(4):
        validated(run, extension, step, rounds)
        if step != 1:
            (tmp_path / "validation" / f"step_{step:06d}.npz").touch()
    assert episode_steps(tmp_path) == [0, 2, 3]
    assert len(list((tmp_path / "validation").glob("episode_*"))) == 6


def test_a_training_step_has_its_episodes_and_a_sheet(tmp_path: Path) -> None:
    run, extension = run_of(tmp_path, EDITED)
    step = Step(1, Stopwatch(), credit=torch.ones(3, 2))
    step.tasks = [SimpleNamespace(samples=[drawn(0, 0), drawn(0, 1)])]  # type: ignore[list-item]
    step.scores.add(table([drawn(0, 0), drawn(0, 1), edit(0, 0, grey(20), 0)]))
    step.images = [*pending([grey(10), grey(20)]), *pending([grey(30)])]
    extension.credited(run, step)
    found = json.loads((tmp_path / "live" / "step_000001.json").read_text())
    assert live_steps(tmp_path) == [1] and list(run.found) == ["episode", "train"]
    assert pairs(found["turns"]) == [["draw", None], ["edit", 1]] and found["of"] == 3


def test_the_sheet_shows_each_image_beside_the_one_it_was_made_from() -> None:
    bright, dark = np.full((8, 8, 3), 250, np.uint8), np.full((8, 8, 3), 5, np.uint8)
    samples = [drawn(0, 0), drawn(0, 1), edit(0, 0, bright, 0)]
    found = np.asarray(episode_sheet(table(samples), [dark, bright, bright - 100]))
    assert (found == 250).any() and (found == 150).any() and not (found == 5).all(-1).any()
