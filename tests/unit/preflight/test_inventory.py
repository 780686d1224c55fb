"""What a pipeline consists of."""

import tiny
import torch

from gerl.model.lora import add_lora
from gerl.preflight.inventory import components, count_gradients


def test_networks_and_their_lora() -> None:
    pipe = tiny.build(tiny.CASES["sd3"])
    whole = sum(p.numel() for p in pipe.transformer.parameters())
    linear = sum(isinstance(m, torch.nn.Linear) for m in pipe.transformer.modules())
    pipe.vae.to(torch.bfloat16)
    lora = {f"transformer.{key}": p for key, p in add_lora(pipe.transformer, 4, 4.0, r"attn\.to_[qk]$", 0).items()}
    found = {c.name: c for c in components(pipe.components, lora)}
    transformer = found["transformer"]
    assert next(iter(found)) == "transformer" and "tokenizer" not in found and "scheduler" not in found
    assert (transformer.parameters, transformer.linear_layers) == (whole, linear)
    assert (transformer.lora_modules, transformer.lora_parameters) == (4, sum(p.numel() for p in lora.values()))
    assert transformer.targets == ("transformer_blocks.*.attn.to_q", "transformer_blocks.*.attn.to_k")
    assert (found["vae"].dtype, found["vae"].lora_modules, found["vae"].targets) == ("bfloat16", 0, ())


def test_gradients_are_counted_where_they_are_not_zero() -> None:
    def parameter(gradient: float | None) -> torch.nn.Parameter:
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = None if gradient is None else torch.full((2,), gradient)
        return p

    gradients = {"one.a": 0.5, "one.b": 0.0, "one.c": None, "one.d": float("nan"), "one_more.a": 1.0}
    lora = {f"{name}.lora_B.default.weight": parameter(g) for name, g in gradients.items()}
    lora["one.b.lora_A.default.weight"] = parameter(1.0)
    assert count_gradients(lora, "one") == 2 and count_gradients(lora, "one_more") == 1
