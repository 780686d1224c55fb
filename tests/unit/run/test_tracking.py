import io
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from PIL import Image

from gerl.config import LoggerConfig
from gerl.errors import GerlError
from gerl.run import tracking
from gerl.run.tracking import Tracker, read_metrics

PLAIN = LoggerConfig(tensorboard=False)


def test_one_valid_json_object_per_step(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run", PLAIN)
    tracker.log(0, {"val/reward/mean": 0.5})
    tracker.log(1, {"reward/mean": math.nan, "actor/kl": math.inf, "actor/lr": 1})
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines()  # before close: every line is flushed

    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # a NaN is no JSON
    times = [datetime.fromisoformat(row["time"]) for row in rows]
    assert times[0] <= times[1] <= datetime.now(UTC)
    assert [{name: value for name, value in row.items() if name != "time"} for row in rows] == [
        {"step": 0, "val/reward/mean": 0.5},
        {"step": 1, "reward/mean": None, "actor/kl": None, "actor/lr": 1.0},
    ]
    assert all(next(iter(row)) == "step" for row in rows)
    with pytest.raises(ValueError, match=r"step 1 .*step 1: merge"):
        tracker.log(1, {"val/reward/mean": 0.6})
    tracker.close()
    tracker.close()
    assert read_metrics(path) == rows


def test_resume_cuts_repeated_and_torn_lines(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, PLAIN)
    for step in range(5):
        tracker.log(step, {"x": step / 3})
    tracker.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"step": 5, "x": 1.')
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    tracker = Tracker(tmp_path, PLAIN, start_step=2)
    assert path.read_text().splitlines() == before[:3]
    tracker.log(3, {"x": 9.0})
    tracker.close()
    assert [row["x"] for row in read_metrics(path)] == [0.0, 1 / 3, 2 / 3, 9.0]


def test_read_metrics_names_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(GerlError, match=r"metrics\.jsonl, line 2.*remove"):
        read_metrics(path)
    path.write_bytes(b'{"step": 1}\n\0\0\0')
    assert read_metrics(path) == [{"step": 1}]


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(GerlError, match=r"run .*choose another folder"):
        Tracker(tmp_path / "run", PLAIN)


def test_a_folder_that_is_deleted_while_the_run_writes_to_it(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run", PLAIN)
    tracker.log(1, {"x": 1})
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(GerlError, match=r"run/metrics\.jsonl is gone.* step 2.*deleted or moved"):
        tracker.log(2, {"x": 1})
    tracker.close()


def test_closing_after_an_error_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = [Mock(), Mock()]
    sinks[1].close.side_effect = OSError(28, "No space left on device")
    monkeypatch.setattr(tracking, "open_sinks", lambda *_: sinks)
    tracker = Tracker(tmp_path, PLAIN)
    with pytest.raises(KeyError):
        try:
            raise KeyError("first")
        finally:
            tracker.close()
    with pytest.raises(GerlError, match="No space left"):
        tracker.close()
    assert sinks[0].close.mock_calls == [call(failed=True), call(failed=False)]


@pytest.mark.parametrize("config", [PLAIN, LoggerConfig(trackers=[])], ids=["tensorboard=false", "trackers=[]"])
def test_without_trackers_nothing_but_the_metrics_is_written(config: LoggerConfig, tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, config)
    tracker.log(1, {"x": 1})
    tracker.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_images_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    picture = Image.new("RGB", (8, 4), (255, 0, 0))
    (tmp_path / "config.yaml").write_text("trainer:\n  steps: 3\n")
    tracker = Tracker(tmp_path, LoggerConfig())
    tracker.log(3, {"reward/mean": 0.25, "actor/kl": math.nan})
    assert tracker.images(3, "train", picture) == tmp_path / "samples" / "train_000003.png"
    tracker.alert(3, "no training signal")
    tracker.checkpoint(3, {"lora/weights.safetensors": b"1"})
    tracker.close()
    assert Image.open(tmp_path / "samples" / "train_000003.png").size == (8, 4)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.25)]
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert events.Tags()["images"] == ["samples/train"]
    (shown,) = events.Images("samples/train")
    assert Image.open(io.BytesIO(shown.encoded_image_string)).convert("RGB").getcolors() == [(32, (255, 0, 0))]
    (alert,) = events.Tensors("alerts/text_summary")
    assert alert.step == 3 and alert.tensor_proto.string_val == [b"    no training signal\n"]
    (text,) = events.Tensors("config.yaml/text_summary")
    assert text.tensor_proto.string_val == [b"    trainer:\n      steps: 3\n"]


def test_every_sink_gets_what_is_finite_and_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks, picture = [Mock(), Mock()], Image.new("RGB", (8, 4))
    monkeypatch.setattr(tracking, "open_sinks", lambda *_: sinks)
    tracker = Tracker(tmp_path, PLAIN)
    tracker.log(2, {"reward/mean": 0.25, "actor/kl": math.nan})
    path = tracker.images(2, "train", picture)
    tracker.checkpoint(2, {"lora/weights.safetensors": b"1", "state.safetensors": b"2"})
    tracker.checkpoint(2, {"state.safetensors": b"2"})  # no LoRA, nothing to take
    tracker.alert(2, "a warning")
    tracker.close()
    for sink in sinks:
        assert sink.mock_calls == [
            call.log(2, {"reward/mean": 0.25}),
            call.image(2, "samples/train", path),
            call.lora(2, {"weights.safetensors": b"1"}),
            call.alert(2, "a warning"),
            call.close(failed=False),
        ]
