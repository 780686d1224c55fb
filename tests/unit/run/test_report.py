import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_page import Page

from gerl.commandline.composition import compose_run
from gerl.run import page as page_data
from gerl.run.card import TRAINED, Card
from gerl.run.report import main, write_report
from gerl.run.validation import save_validation

CONFIG = "model:\n  path: signs\n  lora_rank: 8\ntrainer:\n  steps: 20\nrollout:\n  prompts_per_step: 4\n  n: 6\n"
PROMPTS = ['a sign that reads "<b>&482"', "a sign that reads 12", "a sign that reads 7", "not drawn"]


def read(run_dir: Path) -> tuple[str, Page]:
    """The report as it is read without JavaScript, whose scripts are data and those of `gerl watch`."""
    text = write_report(run_dir).read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 2 and page.tags.index("script") > page.tags.index("pre")
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL), page


def frozen(run_dir: Path) -> dict[str, Any]:
    """The data that the page in the report shows."""
    text = write_report(run_dir).read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', text)
    assert "<" not in data
    return json.loads(data)  # type: ignore[no-any-return]


def test_secrets_are_in_no_report_and_in_no_answer_of_the_page(tmp_path: Path) -> None:
    secret = "Pa55phrase-of-mine"
    scorer = f"{{mine: {{path: a.py, kwargs: {{api_key: {secret}, headers: [[Authorization, Token {secret}]]}}}}}}"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        config = compose_run(["experiment=signs", f"reward.scorers={scorer}", f"trainer.seed={len(name)}"]).yaml()
        (tmp_path / name / "config.yaml").write_text(config)
    text = write_report(tmp_path / "one").read_text(encoding="utf-8")
    assert secret in config and "api_key" in text and secret not in text
    one, two = (page_data.RunData(name, tmp_path / name) for name in ("one", "two"))
    assert secret not in json.dumps([one.settings(two), two.settings(None)])


def write_metrics(run_dir: Path, steps: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for step in range(steps + 1):
        row: dict[str, float | None] = {"step": step}
        if step:
            reward = 0.4 + 0.5 * step / steps
            row |= {"reward/mean": reward + rng.normal(0, 0.03), "reward/ocr/mean": reward}
            row |= {"group/zero_std_fraction": 0.1, "actor/clip_fraction": 0.2, "actor/kl": 0.01 * step}
            row["actor/ratio_deviation"] = 0.0 if step % 2 else 1e-7
            row["actor/grad_norm"] = None if step == 3 else 1.0 + rng.random()
            row |= {"timing/rollout_s": 2.0, "timing/update_s": 1.0, "timing/step_s": 3.5}
        if step % 5 == 0:
            row |= {"val/reward/mean": 0.45 + 0.4 * step / steps, "val/ocr/mean": 0.45}
        rows.append(row)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def validate(run_dir: Path, step: int, totals: list[float | None]) -> np.ndarray:
    pixels = np.random.default_rng(step).integers(0, 255, (3, 32, 64, 3)).astype(np.uint8)
    save_validation(run_dir, step, PROMPTS, pixels, totals, {"ocr": totals})
    return pixels


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "signs" / "2024-05-01_10-00-00"
    write_metrics(folder, 20)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def test_pictures_that_nothing_scores_are_neither_better_nor_equal(run_dir: Path) -> None:
    for step in (0, 20):
        validate(run_dir, step, [None] * 4)
    text, page = read(run_dir)
    assert "Before and after" in text and page.tags.count("img") >= 6 and "not scored" in text
    assert "equal" not in text.split("<h2>Before and after</h2>")[1].split("<h2>")[0]


def test_whole_run(run_dir: Path) -> None:
    validate(run_dir, 0, [0.2, 0.9, None, 0.3])
    validate(run_dir, 10, [0.5, 0.5, 0.5, 0.5])
    validate(run_dir, 20, [0.8, 0.4, 0.1, 0.9])
    (run_dir / "checkpoints" / "step_20" / "lora").mkdir(parents=True)
    text, page = read(run_dir)
    assert page.tags.count("img") == 2 * 2 * 3  # the pairs on top and those in the sections
    assert "<b>&482" not in text and "&lt;b&gt;&amp;482" in text
    # Means of the scored prompts, and the mean gain of those scored in both.
    assert ">0.467<" in text and ">0.550<" in text and "+0.233" in text and "4 held-out prompts" in text
    top, sections = text.split("<h2>Before and after</h2>")
    assert re.findall(r'class="gain">([^<]*)<', top) == ["+0.600", "-0.500"]  # in the order of the file
    assert re.findall(r'class="gain">([^<]*)<', sections) == ["+0.600", "-0.500"]
    # of all four prompts, one of which was not scored before and one of which has no picture
    assert "2 better, 0 equal, 1 worse of 4 held-out prompts, 1 without a reward, step 20 against step 0" in top
    assert "3 of 4 shown" in sections and 'href="#worse"' in sections and 'id="worse"' in sections
    assert "1 better of the 3 shown" in sections and "Largest losses among all 4 held-out prompts" in sections
    assert "not scored" in text and "1 min 10 s" in text
    assert "step_20/lora" in text and "load_lora_weights" in text and "lora_rank: 8" in text
    assert read(run_dir)[0] == text


def test_the_best_step_is_named_where_it_is_not_the_last(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows[10]["val/reward/mean"] = 0.99
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    validate(run_dir, 0, [0.1] * 4)
    validate(run_dir, 20, [0.2] * 4)
    text, _ = read(run_dir)
    assert "the best held-out reward was 0.990, at step 10 (on new prompts expect less)" in text


def test_the_configuration_is_shown_by_what_differs_from_the_defaults(run_dir: Path) -> None:
    text, _ = read(run_dir)
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", text)
    assert ("model.lora_rank", "8", "32") in rows and ("rollout.n", "6", "12") in rows
    assert not [row for row in rows if row[0] == "model.path"] and "config.yaml, all keys" in text


def test_every_start_of_the_run_card_is_shown_the_latest_first(run_dir: Path) -> None:
    first = Card(run_dir, ["trainer.steps=5"], "1 on cpu, local", started="2024-05-01T10:00:00Z")
    first.end("interrupted")
    Card(run_dir, ["checkpoint.resume=auto"], "2 on cpu, ray")  # its end is not known yet
    text, _ = read(run_dir)
    latest, before = text.split("<h2>Run card</h2>")[1].split("<h2>")[0].split("</details>")[:2]
    assert re.search(r"<summary>[\d:TZ-]+: .*checkpoint\.resume=auto</summary>", latest)
    assert "<td>started</td><td>2024-05-01T10:00:00Z</td>" in before and "<td>end</td><td>interrupted</td>" in before
    for name, value in (("workers", "2 on cpu, ray"), ("packages torch", version("torch"))):
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in latest
    assert "gerl commit" in latest and "<td>end" not in latest and "{" not in latest


def test_held_out_prompts_that_are_trained_on_are_counted(run_dir: Path) -> None:
    assert TRAINED not in read(run_dir)[0]
    Card(run_dir, [], "1 on cpu, local", facts={TRAINED: 3})
    assert f"3 {TRAINED}" in read(run_dir)[0]


def test_a_run_card_is_shown_whatever_is_in_it(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "Run card" not in read(run_dir)[0]
    start = {
        "command": "train <x>",
        "versions": {"torch": "2.13", "gerl": None},
        "gpus": ["H200", "H200"],
        "others": [],
        "repository": None,
    }
    (run_dir / "run.json").write_text(json.dumps({"sessions": [start, {}, 3]}))
    text, _ = read(run_dir)
    for name, value in (
        ("command", "train &lt;x&gt;"), ("versions torch", "2.13"), ("versions gerl", "-"), ("gpus", "H200, H200"),
        ("others", "none"),
    ):  # fmt: skip
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in text
    assert "<td>repository" not in text and not caplog.messages
    for damaged in ("{", "[]", '{"sessions": 3}', '{"format": 1}'):
        (run_dir / "run.json").write_text(damaged)
        caplog.clear()
        assert "Run card" not in read(run_dir)[0] and "run.json" in caplog.messages[0]


@pytest.mark.parametrize("suffix", ["npz", "json"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b'{"step": 1}', b"[]"])
def test_a_damaged_validation_is_left_out_with_a_warning(
    suffix: str, content: bytes, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step, reward in ((0, 0.1), (10, 0.2), (20, 0.3)):
        validate(run_dir, step, [reward] * 4)
    (run_dir / "validation" / f"step_000020.{suffix}").write_bytes(content)
    text, _ = read(run_dir)
    assert "step 10 against step 0" in text
    (warned,) = caplog.messages
    assert "step_000020.json cannot be read" in warned and "delete it" in warned
    for step in (0, 10):
        (run_dir / "validation" / f"step_{step:06d}.npz").write_bytes(content)
    assert "Before and after" not in read(run_dir)[0]


def test_without_validation_pictures(run_dir: Path) -> None:
    text, page = read(run_dir)
    assert ">0.450<" in text and ">0.850<" in text
    assert page.tags.count("img") == 0 and "There is no checkpoint yet" in text


def test_one_validation(run_dir: Path) -> None:
    validate(run_dir, 0, [0.2, 0.9, None, 0.3])
    text, page = read(run_dir)
    assert page.tags.count("img") == 2 * 3 and "better" not in text


def test_one_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1)
    text, _ = read(tmp_path)
    assert "measured once so far" in text


@pytest.mark.parametrize("content", [None, "", '{"step": 1', '{"step": 1, "reward/mean": null}\n'])
def test_no_metrics_yet(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG if content is None else "not: [valid")
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    text, _ = read(tmp_path)
    assert "No reward measured yet" in text


def test_the_live_page_is_in_the_report_with_its_data(run_dir: Path) -> None:
    for step, reward in ((0, 0.1), (10, 0.2), (20, 0.3)):
        validate(run_dir, step, [reward] * 4)
    found = frozen(run_dir)
    answers = found["answers"]
    assert answers["held_out"]["steps"] == [0, 10, 20] and answers["held_out"]["shown"] == [0, 1, 2]
    assert answers["held_out"]["prompts"] == PROMPTS  # HTML in them is text
    assert set(found["pictures"]) == {f"{step}/{row}" for step in (0, 10, 20) for row in range(3)}
    assert all(uri.startswith("data:image/png;base64,") for uri in found["pictures"].values())
    assert answers["prompt/1"]["scores"] == {"ocr": [0.1, 0.2, 0.3]}
    assert answers["series"]["series"]["val/reward/mean"]["x"] == [0, 5, 10, 15, 20]
    assert answers["run"]["step"] == 20 and not answers["run"]["alive"] and not answers["run"]["writable"]


def test_a_report_has_room_for_some_pictures_of_many(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "STEPS", 3)
    for step in range(8):
        validate(run_dir, step, [0.1] * 4)
    assert frozen(run_dir)["answers"]["held_out"]["steps"] == [0, 4, 7]
    monkeypatch.setattr(page_data, "BYTES", 1)
    assert frozen(run_dir)["answers"]["held_out"]["shown"] == [0]


def test_command_line(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir)]) == 0
    assert (run_dir / "report.html").exists()
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not a run folder" in capsys.readouterr().err
