import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gerl.config import ScorerConfig
from gerl.config.user_files import load_module
from gerl.errors import Interrupted, RewardError
from gerl.objects import PREFIX, function, offered, pipeline
from gerl.protocol import Images, Prompt
from gerl.rewards.manager import functions_of
from gerl.rewards.scorers import Scorer, build_scorer
from gerl.rewards.scorers.custom import Call
from gerl.rewards.worker import RewardWorker

IMAGES = [Image.new("RGB", (8, 8))] * 2


def scorer_file(folder: Path, name: str, value: float) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Score:\n"
        "    value: float\n"
        "LIMIT = 3\n"
        "def compute_score(images, prompts, metadata, scale=1.0):\n"
        f"    return [scale * Score({value}).value for _ in images]\n"
    )
    return str(path)


def test_two_files_of_the_same_name_do_not_collide(tmp_path: Path) -> None:
    paths = [scorer_file(tmp_path / folder, "reward.py", value) for folder, value in (("a", 1.0), ("b", 2.0))]
    scorers = [build_scorer("mine", ScorerConfig(path=path, kwargs={"scale": 10.0})) for path in paths]
    assert [scorer(IMAGES, ["a", "b"], [{}, {}]) for scorer in scorers] == [[10.0, 10.0], [20.0, 20.0]]
    scorers[0].check_prompts([Prompt(0, "anything")])


def test_a_file_imports_its_neighbours_and_not_those_of_another(tmp_path: Path) -> None:
    before, scorers = list(sys.path), list[Scorer]()
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper_scores.py").write_text(f"SCORE = {number}")
        (folder / "late_scores.py").write_text(f"SCORE, CALLS = {number} / 10, []")
        (folder / "r.py").write_text(
            "from helper_scores import SCORE\n"
            "def compute_score(images, prompts, metadata):\n"
            "    import late_scores, helper_scores\n"
            "    late_scores.CALLS.append(1)\n"
            "    return [SCORE + helper_scores.SCORE + late_scores.SCORE + 100 * len(late_scores.CALLS)]\n"
        )
        assert number == load_module("key", str(folder / "r.py"), RewardError).SCORE
        scorers.append(build_scorer("mine", ScorerConfig(path=str(folder / "r.py"))))
        assert sorted(path.name for path in folder.iterdir()) == ["helper_scores.py", "late_scores.py", "r.py"]
    for calls in (100, 200):  # each module is imported once
        assert [scorer(IMAGES[:1], ["a"], [{}]) for scorer in scorers] == [[2.1 + calls], [4.2 + calls]]
    assert sys.path == before and not {"helper_scores", "late_scores"} & sys.modules.keys()


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # as it is wherever nothing says otherwise
    for value in (1.0, 2.0):
        scorer_file(tmp_path, "reward.py", value)
        scorer = build_scorer("ocr", ScorerConfig(path="reward.py"))  # path goes before a scorer of gerl's of that name
        assert scorer(IMAGES, ["a", "b"], [{}, {}]) == [value, value]
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "no.py"}, "reward.scorers.mine.path=no.py: there is no Python file"),
        ({"function": "score"}, "function=score: "),
        ({"function": "score"}, "set reward.scorers.mine.function=compute_score"),
        ({"function": "LIMIT"}, "it is a int; name a function"),
        ({"kwargs": {"factor": 1}}, "other arguments in reward.scorers.mine.kwargs"),
    ],
)
def test_bad_entry_is_one_sentence(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    values: dict[str, object] = {"path": scorer_file(tmp_path, "reward.py", 1.0)} | changes
    with pytest.raises(RewardError, match=re.escape(message)):
        build_scorer("mine", ScorerConfig(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["def compute_score(:", "import no_such_package_here", "1 / 0", "raise SystemExit"])
def test_file_that_cannot_be_imported_is_named_each_time_with_the_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(f"import sys\n{content}\n")
    for _ in range(2):
        with pytest.raises(
            RewardError, match=r"broken\.py: importing it failed with \w+(Error|Exit): .*broken\.py, line 2"
        ):
            build_scorer("mine", ScorerConfig(path=str(path)))


def test_of_several_functions_the_one_that_takes_images_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def helper(x): ...\ndef reward(prompts, images): ...\n")
    with pytest.raises(RewardError, match=r"only helper, reward; set reward\.scorers\.mine\.function=reward$"):
        build_scorer("mine", ScorerConfig(path=str(tmp_path / "r.py")))
    (tmp_path / "r.py").write_text("")
    with pytest.raises(RewardError, match=r"defines no such function; add def compute_score\(images"):
        build_scorer("mine", ScorerConfig(path=str(tmp_path / "r.py")))


def test_an_interrupt_is_not_the_files_failure(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("from gerl.errors import Interrupted\nraise Interrupted(15)")
    with pytest.raises(Interrupted):
        build_scorer("mine", ScorerConfig(path=str(path)))


FUNCTION_IMAGES = [Image.new("RGB", (2, 2))]


def of_images(images: list[Image.Image]) -> list[float]:
    return [1.0 for _ in images]


def of_two(images: list[Image.Image], prompts: list[str]) -> list[float]:
    return [float(len(p)) for p in prompts]


def of_all(
    images: list[Image.Image], prompts: list[str], metadata: list[dict[str, int]], scale: float = 1.0
) -> list[float]:
    return [scale * row["x"] for row in metadata]


def fails(images: list[Image.Image]) -> list[float]:
    raise ValueError("no")


@pytest.mark.parametrize(("called", "score"), [(of_images, 1.0), (of_two, 2.0), (of_all, 3.0), (lambda i: [4.0], 4.0)])
def test_functions_take_what_they_name(called: Callable[..., list[float]], score: float) -> None:
    with offered({"f": called}, {}):
        scorer = build_scorer("f", ScorerConfig(path=f"{PREFIX}f"))
    assert scorer(FUNCTION_IMAGES, ["ab"], [{"x": 3}]) == [score]


def test_kwargs_are_those_of_the_function() -> None:
    with offered({"f": of_all}, {}):
        assert build_scorer("f", ScorerConfig(path="python:f", kwargs={"scale": 2.0}))(
            FUNCTION_IMAGES, ["a"], [{"x": 3}]
        ) == [6.0]
        with pytest.raises(RewardError, match=r"reward\.scorers\.f: f\(.*cannot be called"):
            build_scorer("f", ScorerConfig(path="python:f", kwargs={"y": 2.0}))
    with offered({"f": lambda: 1}, {}), pytest.raises(RewardError, match="cannot be called"):
        build_scorer("f", ScorerConfig(path="python:f"))


def test_without_its_program_a_function_is_not_there() -> None:
    with offered({"f": of_images}, {"signs": object()}):
        assert function("python:f") is of_images and pipeline("signs") is not None
        with offered({"g": of_two}, {}):
            assert function("python:f") is of_images and function("python:g") is of_two
        assert function("python:g") is None
    assert function("python:f") is None and pipeline("signs") is None
    with pytest.raises(RewardError, match=r"reward\.scorers\.f\.path=python:f: .*gerl\.train.*resume"):
        build_scorer("f", ScorerConfig(path="python:f"))


def test_a_worker_gets_its_functions_and_names_the_line_that_raised() -> None:
    scorers = {"f": ScorerConfig(path="python:f"), "ocr": ScorerConfig()}
    with offered({"f": fails, "other": of_two}, {}):
        functions = functions_of(scorers)
        assert functions == {"f": fails}
        worker = RewardWorker({"f": scorers["f"]}, 0, ".", functions)
        worker.build()
        answer = worker.score("f", [(0, 0)], ["a"], [{}], Images(0, np.zeros((1, 2, 2, 3), np.uint8), 0.0))
    reason = answer.rows[0]["f"].reason  # type: ignore[union-attr]
    assert "ValueError: no" in reason and "test_custom.py, line" in reason and 'raise ValueError("no")' in reason


FILE = """
import torch

def compute_score(images, prompts, metadata, power=1):
    assert images.dtype == torch.float32 and 0 <= images.min() and images.max() <= 1
    return images.flatten(1).mean(1) ** power

compute_score.takes_tensors = True
"""
PICTURES = [Image.fromarray(np.full((size, 6, 3), value, np.uint8)) for size, value in ((4, 51), (8, 102))]


def test_a_function_of_a_file_gets_tensors_either_way(tmp_path: Path) -> None:
    (tmp_path / "bright.py").write_text(FILE)
    scorer = build_scorer("bright", ScorerConfig(path=str(tmp_path / "bright.py"), kwargs={"power": 2}))
    assert scorer.differentiable
    assert scorer(PICTURES, ["a", "b"], [{}, {}]) == pytest.approx([0.04, 0.16])  # of two sizes
    images = torch.full((2, 3, 4, 4), 0.5, requires_grad=True)
    scores = scorer.tensor_scores(images, ["a", "b"], [{}, {}])
    scores.sum().backward()
    assert scores.tolist() == [0.25, 0.25]
    assert images.grad is not None and torch.allclose(images.grad, torch.full_like(images, 2 * 0.5 / 48))


def test_videos_are_a_tensor_of_frames_where_it_takes_them() -> None:
    def slow(videos: torch.Tensor) -> torch.Tensor:
        return -(videos[:, 1:] - videos[:, :-1]).abs().flatten(1).mean(1)

    slow.takes_tensors = slow.takes_frames = True  # type: ignore[attr-defined]
    with offered({"slow": slow}, {}):
        scorer = build_scorer("slow", ScorerConfig(path=PREFIX + "slow"))
    frames = [PICTURES[0], Image.fromarray(255 - np.asarray(PICTURES[0])), PICTURES[0]]
    assert scorer([frames], ["a"], [{}]) == pytest.approx([-0.6])  # type: ignore[list-item]
    assert scorer.tensor_scores(torch.zeros(2, 3, 3, 4, 4), ["a"] * 2, [{}] * 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda images: images.detach().flatten(1).mean(1), "returned scores without gradient"),
        (lambda images: images.mean(), r"returned \[\] for images \[2, 3, 4, 4\]: return a tensor"),
        (lambda images: [0.0, 1.0], "returned list for images"),
    ],
)
def test_what_cannot_be_differentiated_is_named_with_its_place(returned: Callable[..., Any], message: str) -> None:
    def given(images: torch.Tensor) -> object:
        return returned(images)

    given.takes_tensors = True  # type: ignore[attr-defined]
    with offered({"f": given}, {}):
        scorer = build_scorer("f", ScorerConfig(path=PREFIX + "f"))
    with pytest.raises(RewardError, match=rf"a reward that takes tensors {message}.*\(.*line \d+: given\)"):
        scorer.tensor_scores(torch.rand(2, 3, 4, 4, requires_grad=True), ["a"] * 2, [{}] * 2)


CALLING_IMAGES, P, M = ["image"], ["prompt"], [{"a": 1}]


class Reward:
    def __call__(self, prompts: Any, images: Any) -> Any:
        return images, prompts

    def method(self, metadata: Any, pictures: Any) -> Any:
        return pictures, metadata


class Module(torch.nn.Module):
    def forward(self, captions: Any, img: Any) -> Any:
        return img, captions


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:  # takes no keywords
        return function(*args)

    return inner


def builtin_like(*args: Any) -> Any:
    return args


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        (lambda images, prompts, metadata: (images, prompts, metadata), {}, (CALLING_IMAGES, P, M)),
        (lambda prompts, images: (images, prompts), {}, (CALLING_IMAGES, P)),
        (lambda metadata, images: (images, metadata), {}, (CALLING_IMAGES, M)),
        (lambda captions, imgs: (imgs, captions), {}, (CALLING_IMAGES, P)),
        (lambda image: image, {}, CALLING_IMAGES),
        (lambda x: x, {}, CALLING_IMAGES),
        (lambda x, y, z: (x, y, z), {}, (CALLING_IMAGES, P, M)),
        (lambda prompts, x: (x, prompts), {}, (CALLING_IMAGES, P)),
        (lambda images, threshold=0.5: (images, threshold), {}, (CALLING_IMAGES, 0.5)),
        (lambda images, prompts=None, text="a": (images, prompts, text), {}, (CALLING_IMAGES, P, "a")),
        (lambda images, threshold, prompts: (images, threshold, prompts), {"threshold": 3}, (CALLING_IMAGES, 3, P)),
        (lambda images, **more: (images, more), {"a": 1}, (CALLING_IMAGES, {"a": 1})),
        (lambda images, *, metadata: (images, metadata), {}, (CALLING_IMAGES, M)),
        (
            functools.partial(lambda images, prompts, scale: (images, prompts, scale), scale=2),
            {},
            (CALLING_IMAGES, P, 2),
        ),
        (decorated(lambda prompts, images: (images, prompts)), {}, (CALLING_IMAGES, P)),
        (builtin_like, {}, (CALLING_IMAGES, P, M)),
        (Reward(), {}, (CALLING_IMAGES, P)),
        (Reward().method, {}, (CALLING_IMAGES, M)),
        (Module(), {}, (CALLING_IMAGES, P)),
    ],
)
def test_a_parameter_gets_what_its_name_says(
    function: Callable[..., Any], kwargs: dict[str, object], expected: object
) -> None:
    assert Call("key", "f", function, kwargs)(CALLING_IMAGES, P, M) == expected  # type: ignore[arg-type]


async def awaited(images: Any) -> Any: ...


async def awaited_parts(images: Any) -> Any:
    yield 1


class Awaited:
    async def __call__(self, images: Any) -> Any: ...


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda prompts, completions, **kwargs: None, "TRL.*rename its parameter completions to images"),
        (lambda completions: None, "TRL"),
        (lambda images, target: None, ""),
        (lambda images, target, x, y: None, r"missing a required argument: 'y'.*key\.kwargs"),
        (lambda: None, "takes none"),
        (lambda threshold=1: None, "takes none"),
        (Reward, r"is a class.*f\(\)"),
        (awaited, "is async.*asyncio.run"),
        (awaited_parts, "is async"),
        (Awaited(), "is async"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_refused(function: Callable[..., Any], remedy: str) -> None:
    if not remedy:
        assert Call("key", "f", function, {}).positional == ["images", "prompts"]  # by their order
        return
    with pytest.raises(RewardError, match=f"^key: f.*{remedy}"):
        Call("key", "f", function, {})
