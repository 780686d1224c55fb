import json
import math
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from gerl.api.runs import Run
from gerl.errors import GerlError
from gerl.run import validation
from gerl.run.validation import (
    SamplingRecord,
    Validation,
    bootstrap,
    estimate,
    estimate_gain,
    load_validation,
    load_validations,
    mean_interval,
    paired_gains,
    remove_images,
    save_validation,
    share_interval,
    standard_error,
    t_quantile,
)
from gerl.run.validation import validation_steps as steps_of

PROMPTS = ["a", "b", "c", "d"]


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (count, 8, 16, 3)).astype(np.uint8)


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    totals, drawing = [0.5, None, float("nan"), 1.0], SamplingRecord([5, 7], [{}, {"image": "x.png"}], "cpu")
    save_validation(tmp_path, 12, PROMPTS, pictures(2), totals, {"ocr": totals}, [1, 3], drawing)
    assert steps_of(tmp_path) == [12]
    assert sorted(p.name for p in (tmp_path / "validation").iterdir()) == ["step_000012.json", "step_000012.npz"]
    loaded = load_validation(tmp_path, 12)
    assert (loaded.step, loaded.prompts, loaded.rewards) == (12, PROMPTS, [0.5, None, None, 1.0])
    assert loaded.by_scorer == {"ocr": loaded.rewards} and loaded.drawing == drawing
    assert loaded.shown == [1, 3] and np.array_equal(loaded.pixels, pictures(2))
    without = load_validation(tmp_path, 12, pictures=False)
    assert without.pixels == [] and without.rewards == loaded.rewards


def test_images_of_a_prompt_are_averaged(tmp_path: Path) -> None:
    ids, looks = [3, 3, 7, 7], {"red": [0.1, None, 0.3, float("nan")]}
    save_validation(tmp_path, 1, ["a", "a", "b", "b"], pictures(2), [0.0, 1.0, 0.5, None], {}, ids=ids, looks=looks)
    found = load_validation(tmp_path, 1)
    assert found.ids == ids and found.first_rows == [0, 2] and found.looks == {"red": [0.1, None, 0.3, None]}
    assert found.by_prompt(found.rewards) == [0.5, 0.5]
    values = json.loads((tmp_path / "validation/step_000001.json").read_text())
    (tmp_path / "validation/step_000001.json").write_text(json.dumps(values | {"ids": [1]}))
    with pytest.raises(GerlError, match="not have one reward per image"):
        load_validation(tmp_path, 1)


def test_a_gain_is_that_of_the_same_images() -> None:
    def validation(
        step: int, rewards: list[float | None], ids: list[int] | None = None, **columns: list[float | None]
    ) -> Validation:
        return Validation(step, PROMPTS, rewards, columns, [], [], None, ids or [])

    first = validation(0, [0.0, 0.5, None, 1.0], ocr=[0.0, 0.5, 1.0, 1.0], gone=[0.0] * 4)
    later = validation(5, [1.0, 0.5, 0.7, 0.5], ocr=[1.0, 1.0, None, 1.0], new=[0.0] * 4)
    found = paired_gains(first, later)
    assert set(found) == {"reward", "ocr"} and found["reward"].mean == pytest.approx((1.0 + 0.0 - 0.5) / 3)
    assert (found["ocr"].mean, found["ocr"].count) == (pytest.approx(0.5), 3)
    ids = [0, 0, 1, 1]  # two images each: the means of prompts are what is averaged
    first, later = validation(0, [0.0, 0.5, None, 1.0], ids), validation(5, [1.0, 0.5, 0.7, 0.5], ids)
    assert (paired_gains(first, later)["reward"].mean, paired_gains(first, later)["reward"].count) == (0.0, 2)
    assert paired_gains(validation(0, [0.0] * 4), later) == {}


def test_pictures_of_several_sizes(tmp_path: Path) -> None:
    images = [np.zeros((4, 8, 3), np.uint8), np.ones((8, 4, 3), np.uint8)]
    save_validation(tmp_path, 0, PROMPTS, images, [1.0] * 4, {}, [0, 2])
    found = load_validation(tmp_path, 0).pixels
    assert [image.shape for image in found] == [(4, 8, 3), (8, 4, 3)] and found[1].all() and not found[0].any()


def test_images_that_would_fill_the_memory_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_validation(tmp_path, 0, PROMPTS, pictures(2), [1.0] * 4, {}, [0, 2])
    monkeypatch.setattr(validation, "LARGEST", 100)
    with pytest.raises(GerlError, match="its images take"):
        load_validation(tmp_path, 0)


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uint8"):
        save_validation(tmp_path, 0, ["a"], np.zeros((1, 4, 4, 3)), [1.0], {})
    with pytest.raises(ValueError, match="1 rewards"):
        save_validation(tmp_path, 0, ["a"], pictures(1), [1.0], {"ocr": []})
    for shown in ([0, 0], [1, 0], [0, 4], [0]):
        with pytest.raises(ValueError, match="increasing indices"):
            save_validation(tmp_path, 0, PROMPTS, pictures(2), [1.0] * 4, {}, shown)


def test_the_ends_have_pictures_and_a_damaged_end_gives_way_to_its_neighbour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (0, 5, 10, 15):
        save_validation(tmp_path, step, PROMPTS, pictures(2), [1.0] * 4, {})
    assert [len(v.pixels) for v in load_validations(tmp_path)] == [2, 0, 0, 2]
    (tmp_path / "validation" / "step_000015.npz").write_bytes(b"torn")
    (tmp_path / "validation" / "step_000000.npz").unlink()
    (tmp_path / "validation" / "step_000010.json").write_text('{"rewards": 3}')
    found = load_validations(tmp_path)
    assert [(v.step, len(v.pixels)) for v in found] == [(5, 2)]
    assert [m.split("step_0000")[1][:2] for m in caplog.messages] == ["10", "00", "15"]
    with pytest.raises(GerlError, match=r"step_000015.*delete it"):
        load_validation(tmp_path, 15)


def test_pictures_between_the_first_and_the_newest_go_but_those_of_the_best(tmp_path: Path) -> None:
    drawing = SamplingRecord([5, 7], [{}, {}], "cpu")
    for step, reward in enumerate((0.1, 0.2, 0.9, 0.3, 0.4, 0.5)):
        save_validation(tmp_path, step, PROMPTS, pictures(2), [reward] * 4, {}, [1, 3], drawing)
    before = [v.rewards for v in load_validations(tmp_path)]
    for _ in range(2):
        remove_images(tmp_path, newest=2)
        assert sorted(path.stem for path in (tmp_path / "validation").glob("*.npz")) == [
            f"step_{step:06d}" for step in (0, 2, 4, 5)
        ]
    assert [v.rewards for v in load_validations(tmp_path)] == before
    assert load_validation(tmp_path, 2).shown == [1, 3] and len(load_validation(tmp_path, 2).pixels) == 2
    gone = load_validation(tmp_path, 3)
    assert (gone.shown, gone.pixels, gone.drawing, gone.rewards) == ([], [], None, [0.3] * 4)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(GerlError, match=r"step 3 .*validation\.keep"):
        Run(tmp_path).images(3)


def test_the_standard_error_is_that_of_the_scored() -> None:
    assert standard_error([1.0, None, 3.0]) == pytest.approx(1.0)  # std sqrt(2) over sqrt(2)
    assert standard_error([1.0, None]) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_file_is_one_sentence(tmp_path: Path, seed: int) -> None:
    save_validation(tmp_path, 12, PROMPTS, pictures(4), [0.5, None, 0.0, 1.0], {})
    draw, refused = random.Random(seed), 0
    for file in sorted((tmp_path / "validation").iterdir()):
        whole = file.read_bytes()
        for _ in range(100):
            damaged = bytearray(whole[: draw.choice([len(whole), draw.randrange(len(whole))])])
            for _ in range(draw.randrange(4) if damaged else 0):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            file.write_bytes(damaged)
            try:
                assert len(load_validation(tmp_path, 12).prompts) == 4
            except GerlError as error:
                refused += 1
                assert "step_000012" in str(error) and "delete it" in str(error)
        file.write_bytes(whole)
    assert refused > 100
    (tmp_path / "validation" / "step_000012.json").write_text("[" * 10**5)
    with pytest.raises(GerlError, match=r"step_000012.*delete it"):
        load_validation(tmp_path, 12)


@pytest.mark.parametrize(("ones", "n"), [(30, 40), (3, 25), (20, 20)])
def test_the_interval_of_a_share_has_the_quantiles_of_a_binomial(ones: int, n: int) -> None:
    low, high = bootstrap([1.0] * ones + [0.0] * (n - ones))
    chances = [math.comb(n, k) * (ones / n) ** k * (1 - ones / n) ** (n - k) for k in range(n + 1)]
    exact = np.searchsorted(np.cumsum(chances), [0.025, 0.975]) / n
    assert [low, high] == pytest.approx(list(exact), abs=1.01 / n if ones < n else 1e-12)


def test_the_interval_of_many_values_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(0).exponential(size=400)
    low, high = bootstrap(list(values), confidence=0.8)
    half = NormalDist().inv_cdf(0.9) * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.06 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.06 * half)
    assert bootstrap(list(values)) == bootstrap(list(values)) != bootstrap(list(values), seed=1)


def exact_matches(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.choice([-1.0, 0.0, 1.0], size=count, p=[0.03, 0.85, 0.12])


def shares(generator: np.random.Generator, count: int) -> np.ndarray:
    return (generator.random(count) < 0.9).astype(float)


# name -> draw, true mean, ends; the percentile intervals of 1,000 such samples hold it 71 to 93 times of 100
SAMPLES: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float, tuple[float, float] | None]] = {
    "normal": (lambda generator, count: generator.normal(3.0, 2.0, count), 3.0, None),
    "mostly equal": (exact_matches, 0.09, (-1.0, 1.0)),
    "skewed": (lambda generator, count: generator.lognormal(0.0, 0.5, count), math.exp(0.125), None),
    "share": (shares, 0.9, (0.0, 1.0)),
    "images of a prompt": (
        lambda g, count: (g.normal(0, 1, (count, 1)) + g.normal(0, 1, (count, 4))).mean(1),
        0.0,
        None,
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("count", [12, 24])
def test_at_least_93_of_100_intervals_hold_the_true_mean(name: str, count: int) -> None:
    (draw, true, ends), generator = SAMPLES[name], np.random.default_rng(count)
    intervals = [mean_interval([draw(generator, count)], ends) for _ in range(1000)]
    assert np.mean([low <= true <= high for low, high in intervals]) >= 0.93


def test_the_interval_of_many_normal_values_is_not_needlessly_wide() -> None:
    values = np.random.default_rng(3).normal(size=128)
    (low, high), percentile = mean_interval([values]), bootstrap(list(values))
    assert high - low < 1.05 * (percentile[1] - percentile[0])
    half = 1.97882 * values.std(ddof=1) / math.sqrt(128)  # of the t interval
    assert low <= values.mean() - half + 1e-6 and high >= values.mean() + half - 1e-6


def test_several_groups_have_the_interval_of_welch_and_small_ones_count() -> None:
    generator = np.random.default_rng(4)
    held = []
    for _ in range(500):
        low, high = mean_interval([generator.normal(0.0, 3.0, 6), generator.normal(1.0, 1.0, 40)])
        held.append(low <= 0.5 <= high)
    assert np.mean(held) >= 0.93


def test_equal_values_do_not_make_the_mean_certain() -> None:
    low, high = mean_interval([[1.0] * 12], (0.0, 1.0))
    assert 0.7 < low < 0.8 and high == 1.0  # the exact interval of 12 of 12 begins at 0.735
    low, high = mean_interval([[0.0] * 12], (-1.0, 1.0))
    assert (low, high) == pytest.approx((-0.231, 0.231), abs=1e-3)
    assert mean_interval([[0.5] * 12], (0.5, 0.5)) == (0.5, 0.5)  # nothing tells how large a difference would be


@pytest.mark.parametrize("count", [8, 24])
def test_intervals_of_a_share_hold_every_true_share(count: int) -> None:
    intervals = [mean_interval([[1.0] * k + [0.0] * (count - k)], (0.0, 1.0)) for k in range(count + 1)]
    for share in np.linspace(0.01, 0.99, 99):
        inside = [k for k, (low, high) in enumerate(intervals) if low <= share <= high]
        assert sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in inside) >= 0.945


def test_the_quantiles_of_students_t() -> None:
    found = [t_quantile(0.95, 1), t_quantile(0.95, 2), t_quantile(0.95, 7), t_quantile(0.999, 11), t_quantile(0.9, 30)]
    assert found == pytest.approx([12.7062, 4.30265, 2.36462, 4.43698, 1.69726], rel=1e-5)
    assert t_quantile(0.95, 2001) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-3)


def test_images_of_a_prompt_are_averaged_before_the_interval() -> None:
    values, ids = [1.0, 3.0, 10.0, None, None, None], [0, 0, 1, 1, 2, 2]
    found = estimate(ids, values)
    assert (found.mean, found.count) == (6.0, 2)
    assert (found.low, found.high) == mean_interval([[2.0, 10.0]])
    copies = estimate([0, 1, 2] * 50, [1.0, 2.0, 6.0] * 50)  # not 150 independent images
    assert (copies.low, copies.high) == pytest.approx(mean_interval([[1.0, 2.0, 6.0]]))


def test_without_a_change_the_column_tells_how_large_one_may_be() -> None:
    column = [0.0, 1.0] * 6
    none = estimate_gain(range(12), column, column)
    assert (none.low, none.high) == mean_interval([[0.0] * 12], (-1.0, 1.0))
    assert estimate_gain(range(3), [0.5] * 3, [0.5] * 3).high == 0.0
    one = estimate_gain(range(12), column, [0.1, *column[1:]])  # a change of 0.1, not of 1, is what occurs
    assert one.high < 0.1 and one.low < 0.0


def test_too_few_prompts_have_no_interval() -> None:
    one, none = estimate([4], [2.5]), estimate([4, 5], [None, None])
    assert (one.mean, one.count, none.count) == (2.5, 1, 0)
    assert math.isnan(one.low) and math.isnan(one.high) and math.isnan(none.mean)


def test_the_exact_interval_of_a_share_has_the_tails_of_a_binomial() -> None:
    low, high = share_interval(7, 20, 0.9)
    above = sum(math.comb(20, k) * low**k * (1 - low) ** (20 - k) for k in range(7, 21))
    below = sum(math.comb(20, k) * high**k * (1 - high) ** (20 - k) for k in range(8))
    assert (above, below) == pytest.approx((0.05, 0.05))
    assert share_interval(0, 20) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert share_interval(20, 20)[1] == 1.0
    assert share_interval(1500, 3000) == pytest.approx((0.5 - 0.0181, 0.5 + 0.0181), abs=1e-4)  # beyond a float's range


def test_entries_without_an_array_are_no_images(tmp_path: Path) -> None:
    save_validation(tmp_path, 1, ["a"], pictures(1), [0.5], {})
    with zipfile.ZipFile(tmp_path / "validation" / "step_000001.npz", "w") as archive:
        archive.writestr("pixels", bytes(2**20))
    with pytest.raises(GerlError, match="other images than it lists"):
        load_validation(tmp_path, 1)
