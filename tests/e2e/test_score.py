"""`python -m gerl.score`: files in, tables and gallery out, and one sentence for what does not fit."""

import csv
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gerl.rewards.scorers import SCORERS
from gerl.rewards.scorers.simple import colourfulness
from gerl.score.command import main

# The score is the image's blue value plus the length of its prompt; every call leaves a line behind.
SCORER = """
import json, os, pathlib, signal

def compute_score(images, prompts, metadata, log, fails=(), kill=False):
    calls = pathlib.Path(log)
    before = calls.read_text() if calls.exists() else ""
    call = {"sizes": [image.size for image in images], "prompts": prompts, "metadata": metadata}
    calls.write_text(before + json.dumps(call) + "\\n")
    if kill and before:
        os.kill(os.getpid(), signal.SIGTERM)
    if set(fails) & set(prompts):
        raise RuntimeError("no idea")
    scores = [float(image.getpixel((0, 0))[2] + len(prompt)) for image, prompt in zip(images, prompts)]
    return {"sum": scores, "half": [score / 2 for score in scores]}
"""


class Place:
    """A folder with images, a scorer that keeps a log of its calls, and what scoring left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pictures, self.out = folder, folder / "pictures", folder / "out"
        self.pictures.mkdir()
        (folder / "mine.py").write_text(SCORER)

    def draw(self, name: str, blue: int, size: tuple[int, int] = (8, 6), **save: Any) -> Path:
        path = self.pictures / name
        Image.new("RGB", size, (0, 0, blue)).save(path, **save)
        return path

    def write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text, encoding="utf-8")
        return self.folder / name

    def three(self, *prompts: str) -> str:
        """Draw a.png, b.png and c.png; returns the argument that names the file of their prompts."""
        for name in "abc":
            self.draw(f"{name}.png", 1)
        path = self.write("prompts.txt", "\n".join(prompts))
        return f"prompts={path}"

    def score(self, *arguments: str, images: Path | None = None, scorer: str = "", expect: int = 0) -> None:
        given = [f"images={images or self.pictures}", f"out={self.out}", "logger.progress=false", "reward.retries=0"]
        assert main([*given, *self.mine(scorer), *arguments]) == expect

    def mine(self, kwargs: str = "") -> list[str]:
        log = f"{{log: {self.folder / 'calls'}{kwargs}}}"
        return [f"reward.scorers.mine.path={self.folder / 'mine.py'}", f"reward.scorers.mine.kwargs={log}"]

    @property
    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "scores.jsonl").read_text("utf-8").splitlines()]

    @property
    def totals(self) -> dict[str, float | None]:
        return {Path(row["image"]).name: row["total"] for row in self.rows}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_rows_of_a_prompt_file_belong_to_the_images_by_name(place: Place) -> None:
    for name, blue in (("img10.png", 30), ("img2.webp", 20), ("img1.PNG", 10)):
        place.draw(name, blue, lossless=True)
    place.draw(".hidden.png", 99)
    prompts = place.write("prompts.txt", "a\n\nbb\nccc\n")
    place.score(f"prompts={prompts}")
    assert [row["prompt"] for row in place.rows] == ["a", "bb", "ccc"]
    assert place.totals == {"img1.PNG": 11.0, "img2.webp": 22.0, "img10.png": 33.0}
    assert [row["mine/half"] for row in place.rows] == [5.5, 11.0, 16.5]


def test_images_of_several_sizes_share_a_batch(place: Place) -> None:
    sizes = [(8, 6), (4, 4), (8, 6), (6, 8), (8, 6)]
    for i, size in enumerate(sizes):
        place.draw(f"{i}.png", 10 * i, size)
    rows = [json.dumps({"prompt": f"p{i}", "number": i}) + "\n" for i in range(5)]
    place.score(f"prompts={place.write('prompts.jsonl', ''.join(rows))}", "batch=2")
    assert [call["prompts"] for call in place.calls] == [["p0", "p1"], ["p2", "p3"], ["p4"]]
    assert [row["number"] for call in place.calls for row in call["metadata"]] == [0, 1, 2, 3, 4]
    assert [size for call in place.calls for size in call["sizes"]] == [list(size) for size in sizes]
    assert list(place.totals.values()) == [2.0, 12.0, 22.0, 32.0, 42.0]


def test_a_groupwise_scorer_gets_all_images_of_a_prompt_in_one_call(place: Place) -> None:
    path = place.folder / "rank.py"
    path.write_text(
        "import numpy as np\n\n"
        "def compute_score(images, prompts, metadata):\n"
        "    values = [np.asarray(image).mean() for image in images]\n"
        "    return [sorted(values).index(value) + 10 * len(images) for value in values]\n\n"
        "compute_score.groupwise = True\n"
    )
    for i, size in enumerate([(4, 4), (8, 6), (4, 4), (6, 8)]):
        place.draw(f"{i}.png", 60 - 10 * i, size)
    prompts = place.write("prompts.txt", "a\nb\na\na\n")
    place.score(f"prompts={prompts}", "batch=1", f"reward.scorers.rank.path={path}")
    assert [row["rank"] for row in place.rows] == [32.0, 10.0, 31.0, 30.0]


def test_a_threshold_gives_a_success_rate_and_equal_prompts_the_best_of_them(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(4):
        place.draw(f"{i}.png", 10 * i)
    prompts = place.write("prompts.txt", "aa\nbb\naa\nbb\n")
    with caplog.at_level(logging.INFO):
        place.score(f"prompts={prompts}", "reward.scorers.mine.success=20")
    lines = {words[0]: words[1:3] for line in caplog.text.splitlines() if len(words := line.split()) > 2}
    assert lines["mine/success_rate"] == ["2", "0.5"] and lines["mine/pass_at_2"] == ["2", "1"]
    assert "mine/success_rate" in (place.out / "gallery.html").read_text()


def test_the_total_is_the_weighted_sum_and_a_watched_scorer_only_a_column(place: Place) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(place.pictures / "a.png")
    place.score("prompt=abc", "reward.scorers.mine.weight=0", "reward.scorers.colourfulness.weight=0.5")
    (row,) = place.rows
    expected = colourfulness(Image.fromarray(noise))
    assert (row["total"], row["colourfulness"], row["mine"]) == (0.5 * expected, expected, float(noise[0, 0, 2]) + 3)
    assert list(row) == ["image", "prompt", "total", "mine", "mine/half", "colourfulness", "failure"]


def test_a_list_brings_prompts_metadata_and_paths_of_its_own(place: Place) -> None:
    place.draw("a.png", 1)
    far = place.draw("b.jpg", 0)
    near = '{"image": "pictures/a.png", "prompt": "x", "text": "482", "deep": [1]}\n'
    place.score(images=place.write("rows.jsonl", near + json.dumps({"prompt": "yy", "image": str(far)})))
    assert [row for call in place.calls for row in call["metadata"]] == [{"text": "482", "deep": [1]}, {}]
    assert place.totals == {"a.png": 2.0, "b.jpg": 2.0}


def test_a_csv_file_is_such_a_list_and_an_empty_cell_is_no_metadata(place: Place) -> None:
    place.draw("a.png", 1)
    place.draw("b.png", 2)
    listed = place.write("rows.csv", '\ufeffimage,caption,text\npictures/a.png,"a, b",482\npictures/b.png, c ,\n')
    place.score("data.prompt_key=caption", images=listed)
    assert [row["prompt"] for row in place.rows] == ["a, b", "c"]
    assert [row for call in place.calls for row in call["metadata"]] == [{"text": "482"}, {}]


def test_prompts_may_lie_beside_the_images(place: Place) -> None:
    for name, prompt in (("b", "bb"), ("a", "a ")):
        place.draw(f"{name}.png", 1)
        (place.pictures / f"{name}.txt").write_text(prompt + "\n")
    place.score()
    assert [row["prompt"] for row in place.rows] == ["a", "bb"]


def test_one_photo_is_turned_upright_and_its_prompt_may_have_an_equals_sign(place: Place) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    place.score("prompt=1 + 1 = 2", images=place.draw("a.jpg", 1, (16, 8), exif=exif))
    assert place.rows[0]["prompt"] == "1 + 1 = 2" and place.calls[0]["sizes"] == [[8, 16]]


def test_the_three_files_and_the_log_say_the_same(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.draw("a.png", 1)
    place.draw("b.png", 5)
    with caplog.at_level(logging.INFO, logger="gerl"):
        place.score("prompt=x")
    assert sorted(path.name for path in place.out.iterdir()) == ["gallery.html", "scores.csv", "scores.jsonl"]
    with (place.out / "scores.csv").open(newline="") as file:
        assert [float(row["total"]) for row in csv.DictReader(file)] == list(place.totals.values()) == [2.0, 6.0]
    html = (place.out / "gallery.html").read_text("utf-8")
    assert html.count("data:image/png") == 2 and html.index("b.png") < html.index("a.png")
    lines = {line.split()[0]: line.split()[1:] for line in caplog.messages[-1].splitlines() if line.strip()}
    assert lines["total"] == ["=", "mine", "2", "4", "2", "2", "6"]  # which are the same here
    assert lines["mine/half"] == ["2", "2", "1", "1", "3"]


def test_a_failed_score_is_listed_with_its_reason_and_is_no_zero(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        place.score(place.three("bad", "good", "fine"), "batch=1", scorer=", fails: [bad]")
    bad, good, _ = place.rows
    assert bad["total"] is None and bad["mine"] is None
    assert re.fullmatch(r"mine: RuntimeError: no idea \(/.*mine\.py, line 12: raise .*\)", bad["failure"])
    assert good["total"] == 5.0 and good["failure"] is None
    assert list(bad) == list(good) == ["image", "prompt", "total", "mine", "mine/half", "failure"]
    assert "mine: RuntimeError: no idea" in (place.out / "gallery.html").read_text("utf-8")
    assert "failures: 1 of 3 images; the first, a.png: mine: RuntimeError: no idea" in caplog.messages[-1]


def test_without_a_single_score_the_exit_code_is_1(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.draw("a.png", 1)
    place.score("prompt=bad", scorer=", fails: [bad]", expect=1)
    assert re.search(r"mine: RuntimeError: no idea \(.*line 12: .*\); fix the scorer", capsys.readouterr().err)
    assert place.totals == {"a.png": None}


def test_on_error_stop_stops_and_keeps_what_was_scored(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    given = place.three("good", "bad", "fine")
    place.score(given, "batch=1", "reward.on_error=stop", scorer=", fails: [bad]", expect=1)
    assert "b.png has no score: mine: RuntimeError: no idea" in capsys.readouterr().err
    assert len(place.calls) == 2 and place.totals == {"a.png": 5.0, "b.png": None}


def test_a_signal_ends_it_and_what_was_scored_is_kept(place: Place) -> None:
    place.score(place.three("x", "x", "x"), "batch=1", scorer=", kill: true", expect=143)
    assert len(place.calls) == 2 and place.totals == {"a.png": 2.0}


def test_an_experiment_brings_its_scorers(place: Place) -> None:
    place.draw("a.png", 1)
    place.score('prompt="x"', "experiment=signs", "reward.scorers.ocr.weight=0")
    assert place.rows[0]["ocr"] == 0.0 and place.rows[0]["mine"] == 4.0
    own = place.write("mine.yaml", "reward: {scorers: {colourfulness: {weight: 0}}}\ntrainer: {steps: 3}\n")
    place.score("prompt=x", f"experiment={own}")
    assert set(place.rows[0]) == {"image", "prompt", "total", "colourfulness", "mine", "mine/half", "failure"}


def test_the_module_runs_as_a_command(place: Place) -> None:
    place.draw("a.png", 1)
    command = [sys.executable, "-m", "gerl.score", "images=pictures", "prompt=x", "out=out"]
    ran = subprocess.run(
        [*command, "reward.scorers.jpeg_compressibility.weight=1"],
        cwd=place.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "jpeg_compressibility" in ran.stderr and "1/1" in ran.stderr and str(Path("out/gallery.html")) in ran.stderr


FOLDER = ["images={}/pictures", "out={}/out"]
# (arguments, exit code, words of the sentence); {} is the folder of `bad`.
TABLE: dict[str, tuple[list[str], int, list[str]]] = {
    "no images given": (["out={}/out"], 2, ["images is missing", "images=a folder"]),
    "no out given": (["images={}/pictures"], 2, ["out is missing"]),
    "key of training": ([*FOLDER, "trainer.steps=3"], 2, ["trainer.steps: scoring has no such key", "reward.*"]),
    "mistyped reward": ([*FOLDER, "reward.retires=1"], 2, ["reward.retires", "'reward.retries'"]),
    "both prompts": ([*FOLDER, "prompt=a", "prompts=b"], 2, ["prompts and prompt are both given"]),
    "batch": ([*FOLDER, "prompt=a", "batch=0"], 2, ["batch=0"]),
    "taken name": ([*FOLDER, "prompt=a", "reward.scorers.total.path=x.py"], 2, ["reward.scorers.total", "another"]),
    "unknown scorer": ([*FOLDER, "prompt=a", "reward.scorers.nope.weight=1"], 1, ["reward.scorers.nope"]),
    "no such folder": (["images={}/nope", "out={}/out"], 1, ["images={}/nope does not exist"]),
    "another file": (["images={}/mine.py", "out={}/out"], 1, ["images={}/mine.py is not a .png"]),
    "empty folder": (["images={}/empty", "out={}/out"], 1, ["images={}/empty has no image"]),
    "too few prompts": ([*FOLDER, "prompts={}/one.txt"], 1, ["has 1 prompts for the 2 images", "prompt=TEXT"]),
    "no prompt file": ([*FOLDER, "prompts={}/nope.txt"], 1, ["prompts={}/nope.txt", "does not exist"]),
    "no sidecar": (FOLDER, 1, ["b.png has no prompt", "b.txt"]),
    "empty sidecar": (["images={}/blank", "out={}/out"], 1, ["a.txt is empty"]),
    "broken image": (["images={}/broken", "out={}/out", "prompt=a"], 1, ["cut.png cannot be read as an image"]),
    "deep image": (["images={}/deep", "out={}/out", "prompt=a"], 1, ["deep.png has more than 8 bits"]),
    "missing image": (["images={}/missing.jsonl", "out={}/out"], 1, ["nope.png does not exist"]),
    "row without image": (["images={}/imageless.csv", "out={}/out"], 1, ["imageless.csv:3 has image=None"]),
    "row without prompt": (["images={}/promptless.csv", "out={}/out"], 1, ["promptless.csv:2 has prompt=''"]),
    "wide row": (["images={}/wide.csv", "out={}/out"], 1, ["wide.csv:2 has more cells"]),
    "empty csv": (["images={}/empty.csv", "out={}/out"], 1, ["empty.csv has no prompts"]),
    "list with prompts": (["images={}/missing.jsonl", "out={}/out", "prompt=a"], 2, ["has its own prompts"]),
    "what ocr needs": ([*FOLDER, "prompt=a", "reward.scorers.ocr.weight=1"], 1, ["{}/pictures: prompt 0", "quotes"]),
    "file in the way": (["images={}/pictures", "prompt=a", "out={}/one.txt"], 2, ["out={}/one.txt", "be created"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("bad"))
    for name in ("empty", "blank", "broken", "deep"):
        (place.folder / name).mkdir()
    content = place.draw("a.png", 1).read_bytes()
    place.draw("b.png", 1)
    (place.folder / "blank" / "a.png").write_bytes(content)
    (place.folder / "broken" / "cut.png").write_bytes(content[: len(content) // 2])
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(place.folder / "deep" / "deep.png")
    texts = {
        "pictures/a.txt": "a",
        "one.txt": "a",
        "blank/a.txt": " \n",
        "missing.jsonl": '{"image": "pictures/a.png", "prompt": "a"}\n{"image": "nope.png", "prompt": "a"}\n',
        "imageless.csv": "image,prompt\npictures/a.png,a\n,a\n",
        "promptless.csv": "image,prompt\npictures/a.png,\n",
        "wide.csv": "image,prompt\npictures/a.png,a,b\n",
        "empty.csv": "image,prompt\n",
    }
    for name, text in texts.items():
        place.write(name, text)
    return place


@pytest.mark.parametrize("case", TABLE)
def test_what_does_not_fit_gets_one_sentence_before_any_scoring(
    bad: Place, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, code, words = TABLE[case]
    assert main([argument.replace("{}", str(bad.folder)) for argument in arguments] + bad.mine()) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    for word in words:
        assert word.replace("{}", str(bad.folder)) in said, said
    assert bad.calls == [] and not bad.out.exists()


def test_the_page_on_rewards_has_a_row_for_every_scorer() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")
    section = page.split("\n## The scorers\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| `")]
    missing = [name for name in SCORERS if f"`{name}`" not in rows]
    assert not missing, f"docs/rewards.md: add {', '.join(missing)} to the table"
