import pickle

import torch

from gerl.workers.values import Rows, copied


def test_rows_travel_as_one() -> None:
    """Also where they are parts of one tensor: pickle would take all of it along with each of them."""
    whole = torch.randn(1000, 8)
    rows = Rows(zip(range(5, 505), whole.split(2), strict=True))
    pickled = pickle.dumps(rows)
    assert len(pickled) < 1.2 * whole.nbytes
    back = pickle.loads(pickled)
    assert list(back) == list(rows) and all(torch.equal(back[i], values) for i, values in rows.items())
    back[5].add_(1)  # they may be written
    assert pickle.loads(pickle.dumps(Rows())) == {}


def test_copies_keep_their_place() -> None:
    source = {"a": torch.randn(3, 2, requires_grad=True), "b": torch.tensor(1)}
    first = copied(source, {})
    with torch.no_grad():
        source["a"].add_(1)
    assert not torch.equal(first["a"], source["a"]) and not first["a"].requires_grad
    place = first["a"].data_ptr()
    second = copied(source | {"b": torch.zeros(2), "c": torch.ones(1)}, first)
    assert second["a"].data_ptr() == place and torch.equal(second["a"], source["a"])
    assert second["b"].shape == (2,) and list(second) == ["a", "b", "c"]
