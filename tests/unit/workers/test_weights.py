import pytest
import torch

from gerl.model.ema import EMA
from gerl.model.policy import Policy
from gerl.workers.weights import take_weights, weights_of


def policy_of(seed: int, pipe: object) -> Policy:
    generator = torch.Generator().manual_seed(seed)

    def filled() -> dict[str, torch.nn.Parameter]:
        shapes = {"transformer.a": (2, 3), "transformer.b": (4,)}
        return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}

    def average() -> EMA:
        found = EMA(filled(), 0.9)
        found.updates = seed
        return found

    trained = filled()
    return Policy(
        pipe, {}, trained, average(), version=seed, old=average(), old_is_current=bool(seed), sampler=average(),
        earlier=[average(), average()],
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("earlier", [True, False])
def test_a_worker_that_draws_follows_one_that_trains(earlier: bool) -> None:
    """Also to weights of earlier steps, but only where it is asked to: they are needed after a run was resumed."""
    source, target = policy_of(3, None), policy_of(0, None)
    kept = [{name: value.clone() for name, value in average.average.items()} for average in target.earlier]
    weights = weights_of(source, earlier)
    with torch.no_grad():
        before = {name: p.clone() for name, p in source.trained.items()}
        for p in source.trained.values():
            p.add_(1)  # the weights are a copy
    for array in weights.flat.values():
        array.flags.writeable = False  # as out of Ray's store
    take_weights(target, weights)
    assert all(torch.equal(target.trained[name], value) for name, value in before.items())
    averages, others = target.averages(), source.averages()
    for name in ("ema", "old", "sampler"):
        assert averages[name].updates == 3
        assert all(torch.equal(averages[name].average[key], value) for key, value in others[name].average.items())
    assert target.version == 3 and target.old_is_current
    for found, own, other in zip(target.earlier, kept, source.earlier, strict=True):
        wanted = other.average if earlier else own
        assert all(torch.equal(found.average[key], value) for key, value in wanted.items())
    for p in target.trained.values():
        with torch.no_grad():
            p.add_(1)  # and may be written
