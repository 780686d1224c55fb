import json
from pathlib import Path

from gerl.run.page.columns import POINTS, Columns


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
