"""A suite of one's own with the signs model, from the command line to its files."""

import csv
import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from http_service import Answer, Asked, judge_says, judge_was_asked, serving

import gerl
from gerl.evaluate.command import main
from gerl.evaluate.suites import load

LOCAL = ["cluster.launcher=local", "cluster.threads_per_worker=1", "logger.progress=false"]
KINDS = ("even", "odd")


@pytest.fixture
def suite(tmp_path: Path) -> str:
    """Five prompts, each of which the file has twice: three even ones and two odd ones."""
    rows = [json.dumps({"prompt": f'a sign that reads "{i}"', "kind": KINDS[i % 2]}) for i in range(5)]
    (tmp_path / "signs.jsonl").write_text("\n".join(rows * 2) + "\n")
    digest = hashlib.sha256((tmp_path / "signs.jsonl").read_bytes()).hexdigest()
    content = {
        "title": "Signs, even and odd",
        "source": "a test",
        "prompts": {"source": "a test", "file": "signs.jsonl", "count": 5, "licence": "CC0", "distinct": True}
        | {"sha256": digest},
        "scorers": {"ocr": {"weight": 1.0}, "sharpness": {"weight": 0.0}},
        "columns": {"ocr": {"name": "OCR", "over": "tasks", "factor": 10.0}},
        "tasks": {"column": "kind", "names": list(KINDS)},
        "protocols": {
            "signs": {
                "source": "a test",
                "models": ["signs"],
                "images": 2,
                "keys": {"sampling.height": 32, "sampling.width": 64, "validation.num_inference_steps": 4},
            }
        },
        "differs": ["the noise is another"],
        "published": [{"model": "M", "source": "a paper", "values": {"ocr": 77.5}, "tasks": {"odd": 66.25}}],
    }
    (tmp_path / "signs.yaml").write_text(yaml.safe_dump(content))
    load.cache_clear()
    return str(tmp_path / "signs.yaml")


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "scores.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_suite_is_drawn_by_its_protocol_and_its_tasks_are_averaged(suite: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([f"suite={suite}", f"out={out}", *LOCAL]) == 0
    rows, summary = rows_of(out), json.loads((out / "summary.json").read_text())
    assert len(rows) == 10 and len({row["prompt"] for row in rows}) == 5  # each prompt once, with two images
    assert {"ocr", "sharpness"} < set(rows[0]) and len({row["seed"] for row in rows}) == 10
    said = summary["suite"]
    assert said["protocol_kept"] and said["deviations"] == [] and said["protocol"]["name"] == "signs"
    means = {
        kind: 10 * fmean(float(r["ocr"]) for r in rows if int(r["prompt_id"]) % 2 == i) for i, kind in enumerate(KINDS)
    }
    measured = {m["task"]: m["mean"] for m in said["measured"]}
    assert {kind: measured[kind]["mean"] for kind in KINDS} == pytest.approx(means)
    assert measured[None]["mean"] == pytest.approx(fmean(means.values()))
    assert measured[None]["low"] <= measured[None]["mean"] <= measured[None]["high"]
    assert "77.5" not in json.dumps(said["measured"]) and "77.5" not in (out / "scores.csv").read_text()
    gallery = (out / "gallery.html").read_text()
    assert "published, not measured here" in gallery and "77.5" in gallery and "DEVIATION" not in gallery


def test_deviations_are_named_in_log_summary_and_gallery(
    suite: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    given = ["validation.max_prompts=2", "images=1", "sampling.width=48"]
    with caplog.at_level(logging.INFO, "gerl"):
        assert main([f"suite={suite}", f"out={out}", *given, *LOCAL]) == 0
    said = json.loads((out / "summary.json").read_text())["suite"]
    assert not said["protocol_kept"]
    expected = ["sampling.width=48 (pinned: 64)", "validation.max_prompts=2 (pinned: null)", "images=1 (pinned: 2)"]
    assert sorted(said["deviations"]) == sorted([*expected, "2 of 5 prompts"])
    gallery = (out / "gallery.html").read_text()
    for text in said["deviations"]:
        assert text in gallery and f"DEVIATION, not the published protocol: {text}" in caplog.text
    assert next(r.levelname for r in caplog.records if "sampling.width=48" in r.message) == "WARNING"  # before the work


def test_questions_that_another_judge_answers_are_named_so_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [["a", "a red sign", 1, "0", "Is there a sign?"], ["a", "a red sign", 2, "1", "Is it red?"]]
    with (tmp_path / "graph.csv").open("w", newline="") as file:
        names = ["item_id", "text", "proposition_id", "dependency", "question_natural_language"]
        csv.writer(file).writerows([names, *rows, ["b", "a blue sign", 1, "0", "Is there a sign?"]])
    suite = asdict(load("dpg"))
    suite["prompts"] |= {"source": "a test", "file": "graph.csv", "count": 2}
    suite["prompts"]["git_blob"] = load("dpg").prompts.digest_of((tmp_path / "graph.csv").read_bytes())
    del suite["scorers"]["pickscore"]  # a large model
    (tmp_path / "dpg.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(suite))))

    def answer(asked: Asked) -> Answer:
        return judge_says("No" if "Is it red" in judge_was_asked(asked)[1] else "Yes")[0]

    out = tmp_path / "out"
    with serving(answer) as service, caplog.at_level(logging.INFO, "gerl"):
        judge = f"reward.scorers.dpg.kwargs.base_url={service.url}/v1"
        size = ["sampling.height=32", "sampling.width=64", "validation.num_inference_steps=1"]
        assert main([f"suite={tmp_path / 'dpg.yaml'}", f"out={out}", judge, *size, *LOCAL]) == 0
    assert len(service.asked) == 12  # three questions of four images
    said = json.loads((out / "summary.json").read_text())["suite"]
    assert not said["protocol_kept"] and [m["mean"]["mean"] for m in said["measured"]] == [75.0]
    assert len(said["deviations"]) == 1 and "not by mPLUG-large" in said["deviations"][0]
    for text in (caplog.text, (out / "gallery.html").read_text()):
        assert f"DEVIATION, not the published protocol: {said['deviations'][0]}" in text
        assert "DPG-Bench by another judge" in text and "judged by mPLUG-large" in text


def test_from_python_its_numbers_are_at_hand(suite: str) -> None:
    overrides = ["cluster.launcher=local", "cluster.threads_per_worker=1", "logger.progress=false"]
    found = gerl.evaluate(suite=suite, images=1, overrides=[*overrides, "validation.num_inference_steps=1"])
    assert found.suite is not None and found.complete
    assert [m.task for m in found.suite.measured] == [None, *KINDS]
    assert len(found.suite.deviations) == 2


def test_the_suites_are_listed(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, "gerl"):
        assert main(["suite=?"]) == 0
    assert "t2i_compbench_nonspatial" in caplog.text and "cannot be run" in caplog.text
    assert main(["--help"]) == 0
    assert "geneval, geneval2, ocr" in " ".join(capsys.readouterr().out.split())
