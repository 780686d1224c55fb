"""Weights divided among ranks: two real processes over gloo draw and train as one that has all of them."""

from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks, worst
from transformers import PreTrainedModel

from gerl.errors import ModelError
from gerl.model.sharding import layers, repeated_blocks, shard, sharded_components

EXACT = [name for name in tiny.CASES if name != "sd15"]  # convolutions round by where their weights lie in memory


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the ranks say of each tiny pipeline."""
    cases = [f"draw {name}" for name in tiny.CASES]
    rows = worst(run_ranks("sharded_ranks", tmp_path_factory.mktemp("ranks"), 2, *cases))
    return {case.removeprefix("draw "): row for case, row in rows.items()}


@pytest.mark.parametrize("name", list(tiny.CASES))
def test_a_part_of_the_weights_draws_and_trains_as_the_whole(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["off"] <= (0 if name in EXACT else 1e-5)
    assert 0.5 <= found[name]["share"] < 0.65  # what does not divide by the ranks is padded, and buffers stay whole


def test_blocks_are_the_entries_of_the_outermost_lists() -> None:
    pipe = tiny.build(tiny.CASES["flux"])
    transformer = pipe.transformer
    assert repeated_blocks(transformer) == [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def test_layers_outside_of_the_blocks_that_share_their_weight_stay_whole() -> None:
    model = torch.nn.ModuleDict({k: torch.nn.Linear(2, 2) for k in "abc"})
    model["inner"] = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    model["norm"] = torch.nn.LayerNorm(2)
    assert layers(model, list(model["inner"])) == [model[k] for k in "abc"]
    model["b"].weight = model["a"].weight
    assert layers(model, list(model["inner"])) == [model["c"]]


def test_components_by_name() -> None:
    pipe = tiny.build(tiny.CASES["flux"])
    denoisers = {"transformer": pipe.transformer}
    assert sharded_components(pipe, denoisers, "none") == {}
    assert sharded_components(pipe, denoisers, "denoiser") == denoisers
    everything = sharded_components(pipe, denoisers, "all")
    assert sorted(everything) == ["text_encoder", "text_encoder_2", "transformer"]
    assert all(isinstance(c, PreTrainedModel) for name, c in everything.items() if name != "transformer")


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.shard: odd \(Linear\) has no repeated blocks.*model\.shard=none"):
        shard({"odd": torch.nn.Linear(2, 2)}, set(), None)  # type: ignore[arg-type]
