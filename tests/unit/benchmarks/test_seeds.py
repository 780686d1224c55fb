"""Results of a run with several seeds."""

import seeds

ROWS = [
    {"step": 0, "val/ocr/mean": 0.5, "val/colour/mean": 1.0},
    {"step": 1, "evaluations/forward": 100.0, "evaluations/backward": 20.0, "evaluations/images": 24.0},
    {"step": 2, "evaluations/forward": 80.0, "evaluations/images": 24.0, "val/ocr/mean": 0.7},
]


def test_a_validation_has_what_was_spent_until_then() -> None:
    assert seeds.points(ROWS, "ocr", ["colour"]) == [
        {"step": 0, "evaluations": 0, "images": 0, "ocr": 0.5, "colour": 1.0},
        {"step": 2, "evaluations": 200, "images": 48, "ocr": 0.7},
    ]


def test_each_seed_is_a_run_of_the_given_keys() -> None:
    arguments = seeds.Job(("experiment=signs", "logger.report=true"), 7).arguments(seeds.RESULTS)
    assert {"experiment=signs", "trainer.seed=7"} < set(arguments)
    assert "logger.report=true" in arguments and "logger.report=false" not in arguments  # a key is not given twice


def test_the_interval_is_that_of_the_t_distribution() -> None:
    assert seeds.mean_and_interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484"  # 4.303 / sqrt(3), of two degrees of freedom
    assert seeds.mean_and_interval([0.5]) == "0.500"
