import json
import re
from pathlib import Path

import numpy as np
import pytest
from html_page import Page

from gerl.errors import GerlError
from gerl.run import charts
from gerl.run.report import load_validation, main, save_validation, validation_steps, write_report

CONFIG = "model:\n  path: signs\n  lora_rank: 8\ntrainer:\n  steps: 20\nrollout:\n  prompts_per_step: 4\n  n: 6\n"
PROMPTS = ['a sign that reads "<b>&482"', "a sign that reads 12", "a sign that reads 7", "not drawn"]


def read(run_dir: Path) -> tuple[str, Page]:
    text = write_report(run_dir).read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    return text, page


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


def test_validation_round_trip(tmp_path: Path) -> None:
    pixels = validate(tmp_path, 12, [0.5, None, float("nan"), 1.0])
    assert validation_steps(tmp_path) == [12]
    assert sorted(p.name for p in (tmp_path / "validation").iterdir()) == ["step_000012.json", "step_000012.npz"]
    loaded = load_validation(tmp_path, 12)
    assert (loaded.step, loaded.prompts, loaded.rewards) == (12, PROMPTS, [0.5, None, None, 1.0])
    assert loaded.by_scorer == {"ocr": loaded.rewards}
    assert np.array_equal(loaded.pixels, pixels)
    (tmp_path / "validation" / "step_000012.npz").write_bytes(b"torn")
    with pytest.raises(GerlError, match="step_000012"):
        load_validation(tmp_path, 12)


def test_validation_shapes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uint8"):
        save_validation(tmp_path, 0, ["a"], np.zeros((2, 4, 4, 3), dtype=np.uint8), [1.0], {})
    with pytest.raises(ValueError, match="1 rewards"):
        save_validation(tmp_path, 0, ["a"], np.zeros((1, 4, 4, 3), dtype=np.uint8), [1.0], {"ocr": []})


def test_whole_run(run_dir: Path) -> None:
    validate(run_dir, 0, [0.2, 0.9, None, 0.3])
    validate(run_dir, 10, [0.5, 0.5, 0.5, 0.5])
    validate(run_dir, 20, [0.8, 0.4, 0.1, 0.9])
    (run_dir / "checkpoints" / "step_20" / "lora").mkdir(parents=True)
    text, page = read(run_dir)
    assert page.tags.count("img") == 6
    assert page.tags.count("svg") >= 9
    assert "<b>&482" not in text and "&lt;b&gt;&amp;482" in text
    # Means of the scored prompts, and the mean gain of those scored in both.
    assert ">0.467<" in text and ">0.550<" in text and "+0.233" in text and "4 held-out prompts" in text
    gains = re.findall(r'class="gain">([^<]*)<', text)
    assert gains == ["+0.600", "-0.500"]
    assert "not scored" in text and "1 min 10 s" in text
    assert "step_20/lora" in text and "load_lora_weights" in text and "lora_rank: 8" in text
    assert read(run_dir)[0] == text


def test_without_validation_pictures(run_dir: Path) -> None:
    text, page = read(run_dir)
    assert ">0.450<" in text and ">0.850<" in text
    assert page.tags.count("img") == 0 and "There is no checkpoint yet" in text


def test_one_validation(run_dir: Path) -> None:
    validate(run_dir, 0, [0.2, 0.9, None, 0.3])
    _, page = read(run_dir)
    assert page.tags.count("img") == 3


def test_one_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1)
    text, page = read(tmp_path)
    assert page.tags.count("svg") > 2 and "measured once so far" in text


@pytest.mark.parametrize("content", [None, "", '{"step": 1', '{"step": 1, "reward/mean": null}\n'])
def test_no_metrics_yet(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG if content is None else "not: [valid")
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    text, page = read(tmp_path)
    assert "No reward has been measured yet" in text and "svg" not in page.tags


def test_long_run_is_thinned(tmp_path: Path) -> None:
    rows = [{"step": i, "actor/ratio_deviation": 1e-3 if i == 777 else 1e-8} for i in range(5000)]
    x, y = charts._binned(*charts.series(rows, "actor/ratio_deviation"), reduce=np.max)
    assert len(x) == charts.MAX_POINTS and y.max() == 1e-3


def test_command_line(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir)]) == 0
    assert (run_dir / "report.html").exists()
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere is no run folder" in capsys.readouterr().err
