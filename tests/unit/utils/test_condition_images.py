import json
from pathlib import Path

import diffusers
import pytest
import tiny
from PIL import Image

from gerl.algorithms.planning import micro_batches, plan_prompts, plan_samples, plan_validation, prompt_schedule
from gerl.config import Config, RolloutConfig, ValidationConfig
from gerl.errors import DataError
from gerl.protocol import Prompt, References
from gerl.utils.condition_images import open_picture, picture_arguments, pictures_of
from gerl.utils.dataset import load_prompts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b c.png", "mask.png"):
        Image.new("RGBA", (6, 4), (255, 0, 0, 0)).save(tmp_path / name)
    return tmp_path


def rows(folder: Path, *metadata: dict[str, object]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", **row}) + "\n" for i, row in enumerate(metadata)))
    return path


def test_paths_are_seen_from_the_prompt_file_and_urls_of_files_are_paths(folder: Path) -> None:
    url = (folder / "b c.png").as_uri()
    one, two, none = load_prompts(
        str(rows(folder, {"image": "a.png", "mask_image": "mask.png"}, {"image": ["a.png", url]}, {"tag": 1}))
    )
    assert one.metadata == {"image": str(folder / "a.png"), "mask_image": str(folder / "mask.png")}
    assert two.metadata == {"image": [str(folder / "a.png"), str(folder / "b c.png")]}
    assert none.metadata == {"tag": 1}
    assert pictures_of(two) == (str(folder / "a.png"), str(folder / "b c.png")) and pictures_of(none) == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no.png", r":2 .*image='no\.png'.*correct the path"),
        (["a.png", "no.png"], r":2 .*'no\.png' in image.*correct the path"),
        ("https://example.org/a.png", r":2 .*image='https.*download"),
        ("http://[", r":2 .*image='http.*is not a path"),
        ("~nobody-of-this-name/a.png", r":2 .*is not a path.*correct"),
        ("x" * 300, r":2 .*is not a path.*correct"),
        ("a\0.png", r":2 .*correct the path"),
        ("prompts.jsonl", r":2 .*image='prompts\.jsonl'.*cannot be read as an image.*replace"),
        (5, r":2 .*image=5: expected the path"),
        (["a.png", 5], r":2 .*image=\['a\.png', 5\]: expected the path"),
        ({"bytes": "iVBO", "path": None}, r":2 .*image={.*expected the path"),
    ],
)
def test_a_picture_that_is_not_there_is_named(folder: Path, value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(str(rows(folder, {}, {"image": value})))


def test_pictures_become_arguments_of_pipelines_that_take_them(folder: Path) -> None:
    row = {"image": str(folder / "a.png"), "control_image": str(folder / "a.png")}
    pipe = tiny.build(tiny.CASES["flux"])
    kontext = diffusers.FluxKontextPipeline(**pipe.components)
    (name, picture), *rest = picture_arguments(kontext, Prompt(0, "p", row)).items()
    assert name == "image" and picture.size == (6, 4) and picture.mode == "RGB" and not rest
    assert picture_arguments(pipe, Prompt(0, "p", row)) == {}
    several = picture_arguments(kontext, Prompt(0, "p", {"image": [str(folder / "a.png")] * 2}))
    assert isinstance(several["image"], References) and [p.size for p in several["image"]] == [(6, 4)] * 2
    (folder / "a.png").write_text("no image")
    with pytest.raises(DataError, match=r"prompt 0 'p': .*a\.png .*image.*replace"):
        picture_arguments(kontext, Prompt(0, "p", row))


def test_no_micro_batch_mixes_prompts_with_pictures(folder: Path) -> None:
    prompts = load_prompts(str(rows(folder, {"image": "a.png"}, {"image": "b c.png"}, {}, {})))
    config = Config(rollout=RolloutConfig(4, 3, 2), validation=ValidationConfig(micro_batch_size=2))
    samples = plan_samples(config, plan_prompts(prompt_schedule(config, prompts), prompts, 1), 1, 0)
    for batch in micro_batches(samples, 2):
        assert len(batch) <= 2 and len({pictures_of(sample.prompt) for sample in batch}) == 1
    assert [[s.prompt.id for s in batch] for batch in plan_validation(config, prompts, 0)] == [[0], [1], [2, 3]]


def test_a_postscript_file_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.eps").read_bytes())
    for name in ("a.eps", "a.png"):
        with pytest.raises(DataError, match="PostScript"):
            open_picture(tmp_path / name)
