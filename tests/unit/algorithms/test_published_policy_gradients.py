"""The presets of the policy gradients against what is published: no number without a source, or a reason."""

import re
from typing import Any

import pytest
import yaml
from published_policy_gradients import DEVIATIONS, PUBLISHED

from gerl.commandline.composition import compose_run
from gerl.commandline.experiments import config_folder
from gerl.config.changes import settings_of

SOURCE = re.compile(r"# (\w[\w-]*/[\w.-]+ \S+|gerl: |.*\(:\d+\)|the clip range is published for 512 px)")


def flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, value in values.items():
        rows |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return rows


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_as_published_or_says_why_not(preset: str) -> None:
    composed = compose_run([f"algorithm={preset}", "experiment=plain"]).config  # an experiment's own numbers come last
    found, listed = flat(dict(settings_of(composed))), DEVIATIONS.get(preset, {})
    assert set(listed) <= set(PUBLISHED[preset])
    for key, (published, _) in PUBLISHED[preset].items():
        if key not in listed:
            assert found[key] == published, key
            continue
        value, reason = listed[key]
        assert found[key] == value != published and reason, key  # a deviation that is none is out of date


@pytest.mark.parametrize("preset", PUBLISHED)
def test_every_number_of_a_preset_has_its_source(preset: str) -> None:
    text = (config_folder() / "algorithm" / f"{preset}.yaml").read_text()
    keys = flat(yaml.safe_load(text))
    del keys["algorithm.name"]
    assert set(keys) <= set(PUBLISHED[preset])
    for line in text.splitlines():
        if re.match(r"  \w+: ", line) and not line.startswith("  name: "):
            assert SOURCE.search(line), line


def test_every_policy_gradient_takes_several_updates() -> None:
    assert {PUBLISHED[preset]["actor.updates_per_step"][0] > 1 for preset in PUBLISHED} == {True}
    clipped = {preset for preset, keys in PUBLISHED.items() if "algorithm.clip_dimensions" in keys}
    assert clipped == set(PUBLISHED) - {"flow_dppo"}
