"""Every preset against what was published, number by number: the tables are in tests/published.py.

A preset that deviates without being listed fails, and so does a deviation that is listed but is none.
"""

import re
from typing import Any

import pytest
import yaml
from published import COMMITS, DEVIATIONS, GERLS_OWN, OBLIGATORY, OWN, PAPERS, PUBLISHED, UNSET

from gerl.commandline.composition import compose_run, config_folder
from gerl.config.changes import flat_settings, settings_of

CITED = re.compile(r" # (gerl: .|\[\d\]\S* ?\S*:\d|\[\d\]:\d|\w[\w-]*/[\w.-]+ \S+|arXiv \d{4}\.\d{5}|.*\(:\d+\))")
PRESETS = sorted(path.stem for path in (config_folder() / "algorithm").glob("*.yaml"))


def text_of(preset: str) -> str:
    return (config_folder() / "algorithm" / f"{preset}.yaml").read_text()


def keys_of(preset: str) -> set[str]:
    blocks = yaml.safe_load(text_of(preset))
    return {f"{block}.{key}" for block, values in blocks.items() for key in values} - {"algorithm.name"}


def test_every_preset_has_a_table_or_a_paper_or_is_gerls_own() -> None:
    assert set(PUBLISHED) | GERLS_OWN == set(PRESETS)
    assert not set(PUBLISHED) & GERLS_OWN
    assert set(PAPERS) <= set(PUBLISHED)
    for preset, paper in PAPERS.items():
        assert paper in text_of(preset)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_as_published_but_for_what_is_listed(preset: str) -> None:
    composed = compose_run([f"algorithm={preset}", "experiment=plain"]).config  # an experiment's own numbers come last
    found, listed = flat_settings(settings_of(composed)), DEVIATIONS.get(preset, {})
    assert set(listed) <= set(PUBLISHED[preset])
    for key, (published, source) in PUBLISHED[preset].items():
        ours, reason = listed.get(key, (published, ""))
        assert found[key] == ours, f"{key}: {published} in {source}"
        assert not reason or ours != published, f"{key} is listed as a deviation, but is as in {source}"
        assert reason or key not in listed, f"{key} has no reason"


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_table_has_every_setting_of_a_preset(preset: str) -> None:
    own = OWN.get(preset, {})
    assert all(own.values())
    assert keys_of(preset) - set(PUBLISHED[preset]) == set(own)


def test_guidance_images_prompts_and_rate_have_a_source_or_a_reason_why_there_is_none() -> None:
    missing, twice, unnamed = [], [], []
    for preset, published in PUBLISHED.items():
        unset, deviations = UNSET.get(preset, {}), DEVIATIONS.get(preset, {})
        assert all(unset.values())
        explained = [*published, *OWN.get(preset, {}), *unset]
        missing += [f"{preset} {key}" for key in OBLIGATORY if key not in explained]
        twice += [f"{preset} {key}" for key in unset if explained.count(key) > 1 or key not in OBLIGATORY]
        left = set(OBLIGATORY[:3]) & set(published) & set(deviations) - keys_of(preset)
        values = [f"{key}={published[key][0]:g}" for key in sorted(left)]
        unnamed += [f"{preset} {value}" for value in values if value not in text_of(preset)]
    assert set(UNSET) <= set(PUBLISHED)
    assert not missing, f"neither in PUBLISHED nor in OWN nor in UNSET: {missing}"
    assert not twice, f"UNSET is for obligatory keys that are nowhere else: {twice}"
    assert not unnamed, f"the header has to name what was published: {unnamed}"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_setting_of_a_preset_says_where_it_is_from(preset: str) -> None:
    lines = [line for line in text_of(preset).splitlines() if re.match(r"  \w+:", line)]
    assert not [line for line in lines if not line.startswith("  name:") and not CITED.search(line)]


def test_sources_name_a_repository_of_which_the_commit_is_listed_or_a_paper() -> None:
    cited: dict[str, Any] = {}
    for preset, table in PUBLISHED.items():
        for key, (_, source) in table.items():
            if preset not in PAPERS and not source.startswith(("arXiv ", "latents of ")):
                cited.setdefault(source.split(" ")[0], []).append((preset, key, source))
    assert set(cited) == set(COMMITS)
    for commit in COMMITS.values():
        assert re.fullmatch(r"[0-9a-f]{7}", commit)


def test_every_policy_gradient_with_a_clip_takes_several_updates() -> None:
    clipped = {preset for preset, keys in PUBLISHED.items() if "algorithm.clip_dimensions" in keys}
    assert len(clipped) > 7
    assert all(PUBLISHED[preset]["actor.updates_per_step"][0] > 1 for preset in clipped | {"flow_dppo"})
