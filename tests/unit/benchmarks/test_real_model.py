"""benchmarks/real_model.py: a folder with a recipe's model, here of tiny components."""

from pathlib import Path

import gpu_cases
import real_model
import torch
from diffusers import DiffusionPipeline
from gpu_steps import TINY_ENCODER

from gerl.preflight.sizing.facts import architectures


def test_a_pipeline_comes_back_from_its_folder(tmp_path: Path) -> None:
    changes = dict(gpu_cases.TINY_CASES["sd35_medium_tiny"].changes)
    changes |= {"text_encoder": TINY_ENCODER, "text_encoder_2": TINY_ENCODER}
    real_model.write_model("sd35_medium_ocr", tmp_path, ["text_encoder_3"], changes=changes)
    pipe = DiffusionPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16, text_encoder_3=None, tokenizer_3=None)
    assert pipe.text_encoder_3 is None and pipe.tokenizer_3 is None and pipe.transformer.dtype == torch.bfloat16
    weight = pipe.transformer.transformer_blocks[0].attn.to_q.weight
    assert abs(float(weight.detach().float().std()) / real_model.DEVIATION - 1) < 0.1
    for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
        ids = tokenizer("SIGN 482", padding="max_length").input_ids
        config = encoder.config
        assert len(ids) == 77 and ids[0] == config.bos_token_id and ids[9] == config.eos_token_id
        assert set(ids[10:]) == {config.pad_token_id} and max(ids) < config.vocab_size and len(set(ids[1:9])) == 8


def test_a_tokenizer_of_t5_begins_with_the_text() -> None:
    made = real_model.tokenizer_for(architectures()["parts"]["t5_xxl"], 512)
    ids = made("ab", padding="max_length").input_ids
    assert len(ids) == 512 and ids[2] == 1 and set(ids[3:]) == {0} and len(set(ids[:3])) == 3
