"""The settings of on-policy distillation: what is refused, which steps are trained, how teachers are named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training import config

from gerl.algorithms import build_algorithm
from gerl.config.algorithms import Teacher
from gerl.errors import ConfigError

OCR = "ocr"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"teachers": []}, r"algorithm\.teachers=\[\]: .*\{lora: CHECKPOINT\}"),
        ({"teachers": [{"lore": "a"}]}, r"algorithm\.teachers has an entry with lore; allowed are lora, path"),
        ({"teachers": [{"lora": "a", "path": "b"}]}, "lora and path: .*merge"),
        ({"teachers": [{"lora": ""}]}, "lora='': it must be a non-empty string"),
        ({"teachers": [{"lora": "a"}, {"lora": "b"}]}, "two entries with no data_source"),
        ({"teachers": [{"lora": "a", "data_source": OCR}, {"data_source": OCR}]}, "two entries with data_source=ocr"),
        ({"teachers": [{"guidance": -1}]}, "guidance=-1: it must be a number of at least 0"),
        ({"teachers": [{"guidance": True}]}, "guidance=true"),
        ({"teachers": [{"lora": "a", "weight": 0}]}, "weight=0: it must be a number above 0"),
        ({"teachers": [{"call": [1]}]}, r"call=\[1\]: expected arguments"),
        ({"teachers": [{"guidance": 1.0}]}, r"the base model with the guidance of the rollout .*another guidance"),
        ({"sampling_kernel": "ode"}, r"sampling\.kernel=ode: .*distance=mean or velocity"),
        ({"sampling_noise_level": 0.0}, r"sampling\.noise_level=0: .*distance=mean or velocity"),
        ({"dynamic_sampling": 2}, r"algorithm\.dynamic_sampling=2: .*use 0"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config("opd", **keys)


def test_weights_themselves_learn_from_pipelines_and_the_base_model_only() -> None:
    c = config("opd", teachers=[{"lora": "a"}])
    with pytest.raises(ConfigError, match=r"algorithm\.teachers: lora=a .*model\.train=full.*model\.train=lora"):
        replace(c, model=replace(c.model, train="full"))
    c = config("opd", teachers=[{"path": "a", "data_source": OCR}, {"guidance": 2}])
    assert replace(c, model=replace(c.model, train="full")).algorithm.needs.teachers[1] == Teacher(guidance=2.0)


def test_which_steps_are_trained() -> None:
    noisy = build_algorithm(config("opd", steps=6, sampling_window_size=3, sampling_window_range=[0, 5]))
    assert noisy.trained_steps((1, 2, 3), 1) == (1, 2, 3)
    two = build_algorithm(config("opd", steps=6, timesteps=2))
    assert all(set(two.trained_steps((0, 1, 2, 3), s)) <= {0, 1, 2, 3} for s in range(9))
    assert {len(two.trained_steps((0, 1, 2, 3), s)) for s in range(9)} == {2}
    exact = build_algorithm(config("opd", steps=6, sampling_kernel="ode", distance="mean"))
    assert exact.trained_steps((), 1) == (0, 1, 2, 3, 4)
    every = config("opd", steps=6, sampling_kernel="ode", distance="mean", sampling_window_range=[0, None])
    assert build_algorithm(every).trained_steps((), 1) == (0, 1, 2, 3, 4, 5)
    assert config("opd", n=1).rollout.n == 1 and noisy.needs.base_model
    assert not build_algorithm(config("opd", teachers=[{"lora": "one"}])).needs.base_model


def test_teachers_are_said_in_words(tmp_path: Path) -> None:
    assert str(Teacher("a/b", data_source=OCR)) == "a/b for prompts of ocr"
    assert str(Teacher(guidance=4.5, call={"negative_prompt": ""})) == (
        "the base model, guidance_scale=4.5, negative_prompt=''"
    )
    assert Teacher(data_source="a/b,c").name == "a_b_c" and Teacher().name == "others"
