import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gerl.utils.seeding import _settings, _value, derive_seed, isolated, sample_generators, seed_everything
from gerl.utils.versions import has

parts = st.lists(st.one_of(st.integers(), st.text()), min_size=1, max_size=4)


@given(parts, parts)
def test_different_parts_give_different_seeds(a: list[int | str], b: list[int | str]) -> None:
    assert (derive_seed(*a) == derive_seed(*b)) == (a == b)
    assert 0 <= derive_seed(*a) < 2**63


def test_order_kind_and_boundaries_of_parts_count() -> None:
    lists = [("a", 1, 23), ("a", 12, 3), ("a", 3, 12), ("a", "1", 23), ("a1", 23), ("a", 1, 2, 3), ("b", 1, 23)]
    assert len({derive_seed(*each) for each in lists}) == 7


def test_seeds_are_the_same_in_every_process_and_release() -> None:
    code = "from gerl.utils.seeding import derive_seed; print(derive_seed('sample', 0, 1, 2, 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == derive_seed("sample", 0, 1, 2, 3) == 7880822029657238653


def test_seed_everything_seeds_python_numpy_and_torch() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything("rollout", 0, 1)
    first = draw()
    second = draw()
    seed_everything("rollout", 0, 1)
    assert draw() == first and all(a != b for a, b in zip(first, second, strict=True))
    seed_everything("rollout", 0, 2)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_a_generator_for_each_sample() -> None:
    noise = [torch.randn(4, generator=g) for g in sample_generators([3, 2**63 - 1, 3])]
    assert torch.equal(noise[0], noise[2]) and not torch.equal(noise[0], noise[1])
    alone = torch.randn(4, generator=sample_generators([2**63 - 1])[0])
    assert torch.equal(noise[1], alone)
    assert sample_generators([0])[0].device.type == "cpu"


def test_every_bit_of_a_seed_changes_the_noise() -> None:
    seeds = [5, *(5 ^ (1 << bit) for bit in range(63))]
    plain = [tuple(torch.randn(4, generator=torch.Generator().manual_seed(seed)).tolist()) for seed in seeds]
    assert len(set(plain)) == 33  # torch reads the lower 32 bits
    drawn = [tuple(torch.randn(4, generator=g).tolist()) for g in sample_generators(seeds)]
    assert len(set(drawn)) == 64
    assert not set(drawn) & set(plain)


def test_no_two_of_many_sequences_agree_even_in_their_first_numbers() -> None:
    seeds = [derive_seed("sample", 0, step, prompt) for step in range(30) for prompt in range(100)]
    first = torch.stack([torch.randn(32, generator=g) for g in sample_generators(seeds)])
    assert len({tuple(row) for row in first[:, :2].tolist()}) == len(seeds)
    # as random as any noise: 96,000 numbers, mean 0 +- .0032, and rows that have nothing to do with each other
    assert abs(float(first.mean())) < 0.015 and abs(float(first.std()) - 1) < 0.01
    neighbours = (first[1:] * first[:-1]).mean(1)
    assert abs(float(neighbours.mean())) < 0.015 and float(neighbours.std()) < 0.2


def test_a_generator_counts_on_as_any_other() -> None:
    (generator,), (again,) = sample_generators([2**40]), sample_generators([2**40])
    several = torch.cat([torch.randn(7, generator=generator), torch.randn(1000, generator=generator)])
    assert generator.initial_seed() == 2**40 and not torch.equal(several[:7], several[7:14])
    again.set_state(again.get_state())  # what is set can be read back
    torch.testing.assert_close(torch.randn(7, generator=again), several[:7], rtol=0, atol=0)
    twister = np.random.MT19937(2**40)  # and the numbers are those of this algorithm at these words
    twister.state = {"bit_generator": "MT19937", "state": {"key": twister.state["state"]["key"], "pos": 624}}
    uniform = torch.rand(700, generator=sample_generators([2**40])[0])
    assert (uniform * 2**24).tolist() == (twister.random_raw(700) % 2**24).tolist()


def change_settings() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_flash_sdp(False)


def change_precision() -> None:
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"


one_setting = pytest.mark.skipif(not has("torch", "2.9"), reason="torch has these settings from 2.9")


@pytest.mark.parametrize("change", [change_settings, pytest.param(change_precision, marks=one_setting)])
def test_code_of_others_changes_the_settings_of_its_own_blocks_only(change: Callable[[], None]) -> None:
    def settings() -> list[object]:
        return [_value(read) for read, _, _ in _settings()]

    before = settings()
    seed_everything("rollout", 0, 1)
    with isolated():
        change()
        inside = settings()
        [random.random(), np.random.rand(), torch.rand((), device="cpu")]
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    seed_everything("rollout", 0, 1)
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert settings() == before != inside
    with isolated():  # as in a process of its own, where they hold from then on
        assert settings() == inside
        for value, (read, write, _) in zip(before, _settings(), strict=True):
            if _value(read) != value:
                write(value)
    with isolated():
        assert settings() == before
    assert settings() == before


def test_a_file_that_imports_torch_first_leaves_its_defaults() -> None:
    code = (
        "from gerl.utils.seeding import isolated\n"
        "with isolated():\n import torch\n torch.set_default_dtype(torch.float64)\n"
        "assert torch.get_default_dtype() == torch.float32"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
