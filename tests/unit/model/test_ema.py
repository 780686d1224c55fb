import pytest
import torch

from gerl.model.ema import EMA


def parameters(*values: float) -> dict[str, torch.nn.Parameter]:
    return {f"p{i}": torch.nn.Parameter(torch.full((2, 3), value)) for i, value in enumerate(values)}


@pytest.mark.parametrize(
    ("updates", "limit", "decay"),
    [(0, 0.9, 0.1), (7, 0.9, 8 / 17), (80, 0.9, 0.9), (10_000, 0.9, 0.9), (0, 0.0, 0.0), (80, 0.0, 0.0)],
)
def test_warmed_up_decay(updates: int, limit: float, decay: float) -> None:  # T35: 0.1, 0.4706, 0.9
    weights = parameters(0.0, 1.0)
    ema = EMA(weights, limit)
    ema.updates = updates
    for p, new in zip(weights.values(), (1.0, -2.0), strict=True):
        p.data.fill_(new)
    ema.update()
    torch.testing.assert_close(ema.average["p0"], torch.full((2, 3), 1 - decay))
    torch.testing.assert_close(ema.average["p1"], torch.full((2, 3), decay - 2 * (1 - decay)))
    assert ema.updates == updates + 1


def test_the_average_of_a_sequence() -> None:
    weights = parameters(0.0)
    ema = EMA(weights, 0.15)
    expected = 0.0
    for n, value in enumerate([1.0, -2.0, 5.0]):
        weights["p0"].data.fill_(value)
        ema.update()
        d = min((1 + n) / (10 + n), 0.15)
        expected = d * expected + (1 - d) * value
    assert ema.average["p0"][0, 0].item() == pytest.approx(expected)
    assert not ema.average["p0"].requires_grad


def test_swap_and_restore_are_bitwise() -> None:  # T35: on the CPU a view instead of a copy would lose the weights
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(5)) for name in "ab"}
    ema = EMA(weights, 0.9)
    for p in weights.values():
        p.data.add_(torch.randn(5))
    ema.update()
    trained = {name: p.detach().clone() for name, p in weights.items()}
    average = {name: value.clone() for name, value in ema.average.items()}
    pointers = {name: p.data_ptr() for name, p in weights.items()}
    with ema.swapped_in():
        for name, p in weights.items():
            assert torch.equal(p, average[name]) and not torch.equal(p, trained[name])
    for name, p in weights.items():
        assert torch.equal(p, trained[name]) and torch.equal(ema.average[name], average[name])
        assert p.requires_grad and p.data_ptr() == pointers[name]
    with pytest.raises(KeyError), ema.swapped_in():
        raise KeyError
    assert all(torch.equal(p, trained[name]) for name, p in weights.items())


def test_load_continues_exactly() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.nn.Parameter(torch.randn(4))}
    first = EMA(weights, 0.9)
    for _ in range(3):
        weights["a"].data.add_(torch.randn(4))
        first.update()
    second = EMA(weights, 0.9)
    second.load({"a": first.average["a"].clone()}, first.updates)
    weights["a"].data.add_(1.0)
    first.update()
    second.update()
    assert torch.equal(first.average["a"], second.average["a"]) and first.updates == second.updates == 4
    with pytest.raises(KeyError):
        second.load({"b": first.average["a"]}, 1)
