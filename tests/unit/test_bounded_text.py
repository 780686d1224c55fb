from contextlib import suppress

import pytest
import yaml

from gerl.commandline.form import read_yaml
from gerl.config.bounded_text import DEPTH, LARGEST, check_yaml, load_yaml, parse_json
from gerl.errors import ConfigError, GerlError
from gerl.run.card import CARD, read_sessions
from gerl.run.live import read_spans
from gerl.run.settings import read_config
from gerl.run.tracking import METRICS, read_metrics
from gerl.trainer.run_folder import read_configuration
from gerl.web.studio.drafts import read_draft


def powers(first: str, entry: str) -> str:
    """Lines each of which has nine aliases of the line before."""
    return first + "".join(f"a{n}: &a{n} " + entry % ", ".join([f"*a{n - 1}"] * 9) + "\n" for n in range(1, 10))


LAUGHS = powers("a0: &a0 [ha, ha]\n", "[%s]")
REFUSED = {
    "aliases": LAUGHS,
    "aliases of a long text": f"a: &a {'x' * 1000}\nb: [{', '.join(['*a'] * (LARGEST // 1000))}]",
    "merged mappings": powers("a0: &a0 {k: v}\n", "{<<: [%s]}"),
    "an alias within itself": "a: &a [*a]",
    "levels": "[" * (DEPTH + 1) + "]" * (DEPTH + 1),
    "levels beyond the stack": "[" * 5000 + "]" * 5000,
    "levels by aliases": "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, DEPTH + 1)),
    "characters": "a" * (LARGEST + 1),
    "a surrogate": '"\\ud800"',
}


def test_what_exceeds_time_memory_or_the_stack_is_refused():
    read = []
    for what, text in REFUSED.items():
        for reader in (load_yaml, check_yaml):
            with suppress(yaml.YAMLError):
                read.append((what, reader(text)))
    assert read == []


def test_other_texts_are_read_as_before():
    text = "base: &base {lr: 1e-4, layers: [1, 2]}\nactor: {<<: *base, lr: 2}\nname: Zoë\nempty:\n"
    assert load_yaml(text) == yaml.safe_load(text)
    check_yaml(text)
    deep = "[" * (DEPTH - 1) + "]" * (DEPTH - 1)
    assert load_yaml(deep) == yaml.safe_load(deep)
    with pytest.raises(yaml.YAMLError, match="month"):  # no ValueError
        load_yaml("a: 2026-13-01")


def test_json_that_cannot_be_written_again_is_refused():
    nested = [f"{'[' * levels}{']' * levels}" for levels in (DEPTH, DEPTH + 1, 500, 100_000)]
    assert parse_json('{"a": [1, "\\ud83d\\ude00"]}') == {"a": [1, "\U0001f600"]} and parse_json(nested[0])
    read = []
    for text in ('"\\ud83d"', '{"\\udfff": 1}', "NaN", "1e999", "-Infinity", "9" * 5000, b"\xff", *nested[1:]):
        with suppress(ValueError):
            read.append((parse_json(text), text))
    assert read == []


def test_experiments_runs_and_fields_of_the_studio_have_these_limits(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(LAUGHS)
    with pytest.raises(ConfigError, match=r"experiment=mine\.yaml: line .* aliases"):
        read_yaml(path, "experiment=mine.yaml")
    with pytest.raises(ConfigError, match=r"is not the configuration of a run .*aliases"):
        read_configuration(path)
    assert read_config(path) == (LAUGHS, {})
    device = tmp_path / "device" / "config.yaml"
    device.parent.mkdir()
    device.symlink_to("/dev/zero")
    for read in (read_configuration, read_config, read_metrics):
        with pytest.raises(GerlError, match=r"not a regular file|leads out of the folder"):
            read(device)
    assert read_sessions(device) == []
    draft = read_draft({"name": "mine", "scorers": {"ocr": {"kwargs": LAUGHS}}})
    with pytest.raises(ConfigError, match=r"reward\.scorers\.ocr\.kwargs: .*aliases"):
        draft.arguments(tmp_path)


def test_deep_json_in_a_run_is_a_damaged_file(tmp_path):
    deep = "[" * 100_000
    (tmp_path / METRICS).write_text(f"{deep}\n{deep}\n")
    with pytest.raises(GerlError, match="line 1"):
        read_metrics(tmp_path / METRICS)
    (tmp_path / CARD).write_text(deep)
    assert read_sessions(tmp_path / CARD) == [] and read_spans([deep]) == []
