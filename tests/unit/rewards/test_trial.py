"""The trial of the scorers in this process; over Ray it is in tests/e2e/test_rewards.py."""

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gerl.cluster import Cluster
from gerl.config import (
    ClusterConfig,
    Config,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    ScorerConfig,
    ValidationConfig,
)
from gerl.errors import RewardError
from gerl.protocol import Prompt
from gerl.rewards.manager import RewardManager
from gerl.rewards.trial import try_scorers

PROMPTS = [
    Prompt(0, 'a sign that reads "482"', {"data_source": "signs", "n": 1}),
    Prompt(1, "a cat", {"data_source": "photos", "n": 2}),
    Prompt(2, "a dog", {"data_source": "photos", "n": 3}),
]
# What stands on line 6 of a file, behind its helper, and what is said of it.
WRONG = {
    "pass": "returned None, expected a list with one number per image",
    "return 0.5": "returned 0.5, expected a list with one number per image, or a dict of such lists by name: images",
    "return [0.5] * len(images), {}": "returned a tuple of list, dict, expected a list",
    "return {0.1, 0.2, 0.3, 0.4, 0.5}": "returned a set, expected a list",
    'return "0.5"': "returned a str, expected a list with one number per image",
    'return ["0.5"] * len(images)': "returned '0.5', which is not a number",
    "return [0.5]": "returned 1 scores for 5 images, expected one per image",
    "return np.ones((len(images), 1))": "returned a ndarray of shape [5, 1], expected a list",
    "return np.float64(1)": "returned a float64 of shape [], expected a list",
    "return {}": "returned an empty dict",
    'return {"a": [1.0] * len(images), "b": None}': "returned None as 'b', expected a list",
    "return [[0.5]] * len(images)": "returned [0.5], which is not a number",
    'return [float("nan")] * len(images)': "returned nan, which is not finite",
    "return [1e300] * len(images)": "returned 1e+300, above the float32 limit 3.4e+38",
    "return [10**400] * len(images)": "which is not a number",
    "return helper(0)": "ZeroDivisionError: division by zero",
    "import no_such_package": "ModuleNotFoundError: No module named 'no_such_package'",
    "sys.exit(3)": "it called sys.exit(3)",
    "raise SystemExit": "it called sys.exit()",
    "time.sleep(60)": "no answer within 0.5 s",
    "while True: pass": "no answer within 0.5 s",
}
RAISED = ("helper", "import no", "exit", "Exit", "sleep", "while")


def scorer(folder: Path, line: str, name: str = "mine.py") -> str:
    (folder / name).write_text(
        "import os, sys, time\nimport numpy as np\ndef helper(x):\n    return 1 / x\n"
        f"def compute_score(images, prompts, metadata, **kwargs):\n    {line}\n"
    )
    return str(folder / name)


def trial(
    on: bool = True, call: dict[str, Any] | None = None, held_out: list[Prompt] | None = None, **scorers: ScorerConfig
) -> None:
    """Three images a group, five a micro-batch."""
    config = Config(
        reward=RewardConfig(scorers, trial=on),
        rollout=RolloutConfig(n=3, micro_batch_size=5),
        sampling=SamplingConfig(height=16, width=24, call=call or {}),
        validation=ValidationConfig(data="signs_val"),
    )
    manager = RewardManager(config.reward, Cluster(ClusterConfig(launcher="local")))
    try_scorers(manager, config, PROMPTS, held_out or [])


@pytest.mark.parametrize("line", WRONG)
def test_what_a_scorer_does_wrong_is_said_with_the_line_of_the_users_file(tmp_path: Path, line: str) -> None:
    path = scorer(tmp_path, line)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RewardError) as caught:
        trial(mine=ScorerConfig(path=path, timeout=0.5 if "no answer" in WRONG[line] else 600))
    text = str(caught.value)
    assert text.startswith("reward.scorers.mine failed in a trial on grey images: ") and WRONG[line] in text
    assert "reward.trial=false" in text and "\n" not in text
    number = "4: return 1 / x" if "helper" in line else f"6: {line}" if any(w in line for w in RAISED) else "5: compute"
    assert f"({path}, line {number}" in text
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_scorer_gets_what_training_will_give_it(tmp_path: Path) -> None:
    line = 'open(kwargs["log"], "a").write(repr((images, prompts, metadata))); return [1] * len(images)'
    path, log = scorer(tmp_path, line), tmp_path / "log"
    mine = ScorerConfig(path=path, kwargs={"log": str(log)})

    def seen(**others: ScorerConfig) -> str:
        log.unlink(missing_ok=True)
        trial(**others)
        return log.read_text()

    whole = seen(mine=mine)
    assert whole.count("<PIL.Image.Image image mode=RGB size=24x16") == 5
    assert whole.count("'a cat'") == 2 and whole.count("'a dog'") == 1 and whole.count("'n': 2") == 2
    photos = seen(mine=replace(mine, data_sources=["photos"]), sharpness=ScorerConfig())
    assert "482" not in photos and photos.count("'n': 2") == 3
    Path(path).write_text(Path(path).read_text() + "compute_score.groupwise = True\n")
    group = seen(mine=mine)
    assert group.count("'n': 1") == group.count("size=24x16") == 3 and "a cat" not in group


def test_a_scorer_of_validation_gets_held_out_rows(tmp_path: Path) -> None:
    line = 'open(kwargs["log"], "a").write(repr(prompts)); return [1] * len(images)'
    mine = ScorerConfig(0, scorer(tmp_path, line), kwargs={"log": str(tmp_path / "log")}, during="validation")
    trial(held_out=[Prompt(0, "a bird")], mine=mine, sharpness=ScorerConfig())
    assert (tmp_path / "log").read_text() == repr(["a bird"] * 5)


@pytest.mark.parametrize("takes_frames", [True, False])
def test_a_scorer_of_videos_gets_videos(tmp_path: Path, takes_frames: bool) -> None:
    line = 'open(kwargs["log"], "a").write(f"{len(images)} {type(images[0]).__name__}"); return [1] * len(images)'
    path, log = scorer(tmp_path, line), tmp_path / "log"
    Path(path).write_text(Path(path).read_text() + f"compute_score.takes_frames = {takes_frames}\n")
    trial(call={"num_frames": 4}, mine=ScorerConfig(path=path, kwargs={"log": str(log)}))
    assert log.read_text() == ("5 list" if takes_frames else "20 Image")


def test_a_watched_scorer_that_fails_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = scorer(tmp_path, "return [1.0] * len(images)"), scorer(tmp_path, "time.sleep(60)", "bad.py")
    trial(mine=ScorerConfig(path=good), watched=ScorerConfig(0, bad, timeout=0.5))
    assert re.search(r"watched .*no answer.*bad\.py, line 6.*watched, so the run continues", caplog.text)


def test_some_images_without_a_score_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial(mine=ScorerConfig(path=scorer(tmp_path, 'return [float("nan"), 1, 2, 3, 4]')))
    assert re.search(r"returned nan.*4 of 5 images have a score", caplog.text)


def test_a_repetition_may_succeed_as_in_training(tmp_path: Path) -> None:
    line = 'd = kwargs["d"]; os.path.exists(d) or [os.mkdir(d), sys.exit(1)]; return [1.0] * len(images)'
    trial(mine=ScorerConfig(path=scorer(tmp_path, line), kwargs={"d": str(tmp_path / "d")}))


def test_the_trial_can_be_left_out(tmp_path: Path) -> None:
    trial(False, mine=ScorerConfig(path=scorer(tmp_path, "sys.exit(3)")))


def test_cheap_scorers_of_gerl_are_tried_with_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    names = ("ocr", "sharpness", "colourfulness", "jpeg_compressibility", "jpeg_incompressibility")
    some: dict[str, Any] = {name: ScorerConfig(data_sources=["signs"]) for name in names}
    trial(**some)
    assert not caplog.records
