"""The benchmark of a student of two teachers: its prompts, and its table."""

import json
from pathlib import Path

import two_teachers
from sections import with_section

from gerl.commandline.composition import compose_run


def test_each_text_is_asked_for_in_one_of_two_ways(tmp_path: Path) -> None:
    two_teachers.write_prompts(tmp_path)
    for name, count in (("train", 741), ("val", 128)):
        kinds = {}
        for kind in ("ocr", "red", "both"):
            rows = [json.loads(line) for line in (tmp_path / f"{name}_{kind}.jsonl").read_text().splitlines()]
            kinds[kind] = [row["prompt"] for row in rows]
            assert kind == "both" or {row["data_source"] for row in rows} == {kind}
        assert kinds["both"] == kinds["ocr"] + kinds["red"] and len(set(kinds["both"])) == count
        assert all(prompt.startswith('a sign that reads "') for prompt in kinds["red"])
        assert not any(prompt.startswith("a sign") for prompt in kinds["ocr"])


def test_the_runs_are_composed() -> None:
    for own in two_teachers.OWN.values():
        config = compose_run([*two_teachers.COMMON, two_teachers.SCORERS, *own]).config
        assert {name: scorer.data_sources for name, scorer in config.reward.scorers.items()} == {
            "ocr": ["ocr"],
            "red": ["red"],
        }


def test_the_table_compares_each_student_with_its_own_teachers() -> None:
    def run(seed: int, ocr: float, red: float) -> dict[str, object]:
        specialists = {"ocr": [{"ocr": 0.8 + seed / 10, "red": 0.1}], "red": [{"ocr": 0.5, "red": 0.6}]}
        student = [{"ocr": 0.5, "red": 0.1}, {"ocr": ocr, "red": red}]
        return {"seed": seed, **specialists, "student": student}

    card = {"cpu": "a CPU", "cores": 2, "torch": "2"}
    results = {"command": "it", "card": card, "runs": [run(0, 0.79, 0.5), run(1, 0.89, 0.6)]}
    lines = two_teachers.table(results).splitlines()
    assert lines[2].startswith("| base model | 0.500 ±") and lines[3].startswith("| specialist that writes | 0.850 ± ")
    less = lines[6].split(" | ")
    assert less[1] == "-0.010 ± 0.000" and less[2].startswith("-0.050 ± 0.635")
    assert "2 seeds" in lines[-1] and "a CPU, 2 cores" in lines[-1]


def test_the_page_has_the_committed_results() -> None:
    page = two_teachers.PAGE.read_text(encoding="utf-8")
    content = two_teachers.table(json.loads(two_teachers.RESULTS.read_text()))
    assert page == with_section(page, two_teachers.BEGIN, two_teachers.END, content)
