import json
from pathlib import Path

import numpy as np
from watching import add_episodes, make_run

from gerl.run import page
from gerl.run.page import POINTS, Columns, HeldOut, RunData, encoded, frozen
from gerl.run.validation import save_validation


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_only_new_lines_are_read_and_a_half_written_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    columns = Columns(path)
    columns.read()
    assert columns.last == {} and columns.series("a", 0, 1) is None
    write(path, [{"step": 0, "a": 1.0}, {"step": 1, "a": None, "b": True, "c": [1]}])
    with path.open("a") as file:
        file.write('{"step": 2, "a"')
    columns.read()
    assert columns.series("a", 0, 1) == {"x": [0, 1], "y": [1.0, None]} and set(columns.values) == {"a"}
    with path.open("a") as file:
        file.write(": 3.123456789}\n")
    columns.read()
    assert columns.series("a", 1, 1) == {"x": [1, 2], "y": [None, 3.1235]} and columns.generation == 0
    assert columns.latest("a", 3) == (1 + 3.123456789) / 2 and columns.latest("z") is None


def test_parts_have_the_mean_the_least_and_the_greatest_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = 4 * POINTS
    write(path, [{"step": i, "a": 1000.0 if i == 777 else float(i % 2)} for i in range(steps)])
    columns = Columns(path)
    columns.read()
    assert columns.width() == 4
    found = columns.series("a", 0, 4)
    assert found is not None and found["x"] == list(range(0, steps, 4))
    assert found["high"][777 // 4] == 1000.0 and found["y"][0] == 0.5 and found["low"][777 // 4] == 0.0
    last = columns.series("a", steps - 1, 4)
    assert last == {"x": [steps - 4], "y": [0.5], "low": [0.0], "high": [1.0]}


def test_another_file_is_another_generation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": i, "a": 1.0} for i in range(5)])
    columns = Columns(path)
    columns.read()
    write(tmp_path / "new", [{"step": i, "a": 2.0} for i in range(9)])
    (tmp_path / "new").replace(path)
    columns.read()
    assert columns.generation == 1 and columns.series("a", 0, 1) == {"x": list(range(9)), "y": [2.0] * 9}


def save(folder: Path, step: int, prompts: list[str], rewards: list[float | None]) -> None:
    pixels = np.zeros((len(prompts), 8, 8, 3), np.uint8)
    save_validation(folder, step, prompts, pixels, rewards, {"a": rewards, "b": rewards})


def test_only_validations_of_the_prompts_of_the_newest_are_compared(tmp_path: Path) -> None:
    save(tmp_path, 0, ["other"], [1.0])
    save(tmp_path, 5, ["x", "y"], [0.123456, None])
    save(tmp_path, 6, ["x", "y"], [0.5, 0.7])
    found = HeldOut(tmp_path).read()
    assert found["steps"] == [5, 6] and found["rewards"] == [[0.1235, None], [0.5, 0.7]]
    assert found["errors"] == [None, 0.1]


def test_of_many_validations_some_are_shown(tmp_path: Path, monkeypatch: object) -> None:
    for step in range(12):
        save(tmp_path, step, ["x"], [0.5])
    every, page.STEPS = page.STEPS, 4
    try:
        assert HeldOut(tmp_path).read()["steps"] == [0, 4, 7, 11]
    finally:
        page.STEPS = every


def test_the_error_is_over_prompts_where_they_have_several_images(tmp_path: Path) -> None:
    save(tmp_path, 0, ["x", "x", "y", "y"], [0.0, 1.0, 0.4, 0.8])
    path = tmp_path / "validation" / "step_000000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ids": [0, 0, 1, 1]}))
    found = HeldOut(tmp_path).read()
    assert found["errors"] == [0.05] and found["ids"] == [0, 0, 1, 1]  # means 0.5 and 0.6


def test_nothing_yet(tmp_path: Path) -> None:
    found = HeldOut(tmp_path).read()
    assert found["steps"] == found["prompts"] == found["shown"] == []


def test_large_pictures_are_smaller_and_lossy() -> None:
    content, media = encoded(np.zeros((600, 1200, 3), np.uint8))
    assert media == "image/jpeg" and len(content) < 20_000
    assert encoded(np.zeros((8, 8, 3), np.uint8))[1] == "image/png"


def test_of_validations_only_what_is_shown_stays_in_memory(tmp_path: Path) -> None:
    prompts, ids = [f"prompt {i}" for i in range(4)], [0, 1, 2, 3]
    for step in (0, 5, 10):
        save_validation(tmp_path, step, prompts, [], [0.5] * 4, {"a": [0.5] * 4}, ids=ids, looks={"red": [0.1] * 4})
    held_out = HeldOut(tmp_path)
    held_out.read()
    rows = list(held_out.validations.values())
    assert len(rows) == 3 and not any(row.looks for row in rows)
    assert len({id(row.prompts) for row in rows}) == len({id(row.ids) for row in rows}) == 1


def test_the_episodes_of_the_first_validation_and_of_a_later_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    data = RunData("run", run)
    assert data.episodes() == {} and "turns" not in data.live()  # as in a folder from before there were any
    add_episodes(run, 10)  # a run that was resumed: step 0 has none
    found = data.episodes()
    assert (found["first"]["step"], found["now"], found["steps"]) == (10, {}, [])
    add_episodes(run, 20)
    add_episodes(run, 30)
    assert data.episodes()["now"]["step"] == 30 and data.episodes()["steps"] == [20, 30]
    assert [data.episodes(20)[name]["step"] for name in ("first", "now")] == [10, 20]
    assert [turn[1:3] for turn in data.live()["turns"]] == [["draw", ""], ["edit", "<i>bolder</i>"]]
    (run / "validation" / "episode_000030.json").write_text("{")
    assert data.episodes()["now"]["step"] == 20
    assert data.sheet(20, held_out=True) is not None and data.sheet(15, held_out=True) is None


def test_the_report_has_the_first_and_the_last_episodes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    plain = frozen(run, ("", {}))
    assert plain["answers"]["episodes"] == {"steps": []} and plain["sheet"].startswith("data:image/jpeg")
    for step in (0, 10, 20):
        add_episodes(run, step)
    found = frozen(run, ("", {"episode": {"turns": [{"role": "draw"}, {"role": "edit"}]}}))
    episodes, overview = found["answers"]["episodes"], found["answers"]["run"]
    assert [episodes[name]["step"] for name in ("first", "now")] == [0, 20] and episodes["steps"] == [20]
    assert sorted(found["episodes"]) == ["0", "20"] and found["episodes"]["0"].startswith("data:image/jpeg")
    assert overview["roles"] == ["draw", "edit"] and ("turns", "draw, edit") in overview["facts"]
