"""What the trackers of a run are told, and that they are closed."""

import io
import math
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from PIL import Image
from tracked import TrackedLog

from gerl.config import LoggerConfig
from gerl.errors import GerlError
from gerl.trainer.extensions import trackers

PLAIN = LoggerConfig(tensorboard=False)


def test_closing_after_an_error_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = [Mock(), Mock()]
    sinks[1].close.side_effect = OSError(28, "No space left on device")
    monkeypatch.setattr(trackers, "open_sinks", lambda *_: sinks)
    tracker, first = TrackedLog(tmp_path, PLAIN), KeyError("first")
    with pytest.raises(KeyError):
        try:
            raise first
        finally:
            tracker.close(first)
    tracker.close()
    with pytest.raises(GerlError, match="No space left"):
        TrackedLog(tmp_path, PLAIN).close()
    assert sinks[0].close.mock_calls == [call(failed=True), call(failed=False)]


@pytest.mark.parametrize("config", [PLAIN, LoggerConfig(trackers=[])], ids=["tensorboard=false", "trackers=[]"])
def test_without_trackers_nothing_but_the_metrics_is_written(config: LoggerConfig, tmp_path: Path) -> None:
    tracker = TrackedLog(tmp_path, config)
    tracker.log(1, {"x": 1})
    tracker.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_images_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    picture = Image.new("RGB", (8, 4), (255, 0, 0))
    (tmp_path / "config.yaml").write_text("trainer:\n  steps: 3\n")
    tracker = TrackedLog(tmp_path, LoggerConfig())
    tracker.log(3, {"reward/mean": 0.25, "actor/kl": math.nan})
    assert tracker.image(3, "train", picture) == tmp_path / "samples" / "train_000003.png"
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
    monkeypatch.setattr(trackers, "open_sinks", lambda *_: sinks)
    tracker = TrackedLog(tmp_path, PLAIN)
    tracker.log(2, {"reward/mean": 0.25, "actor/kl": math.nan})
    path = tracker.image(2, "train", picture)
    tracker.checkpoint(2, {"lora/weights.safetensors": b"1", "state.safetensors": b"2"})
    tracker.checkpoint(3, {"state.safetensors": b"2"})  # no LoRA, nothing to take
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
