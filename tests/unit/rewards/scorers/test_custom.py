import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from gerl.config import ScorerConfig
from gerl.errors import Interrupted, RewardError
from gerl.protocol import Prompt
from gerl.rewards.scorers import build_scorer

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
