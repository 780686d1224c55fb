"""Write a recipe's model at its real size, with random weights: `python benchmarks/real_model.py FOLDER`.

Classes and configurations are those of gerl's record of architectures; tokenizers are made here, one token a character.
Nothing is downloaded. For Stable Diffusion 3 and FLUX, whose text encoders are CLIP and T5. A run takes it by
`experiment=RECIPE model.path=FOLDER`, and `model.parts.text_encoder_3=null` where that encoder was left out.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - which finds gerl
import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gerl.commandline.composition import compose_run
from gerl.preflight.sizing.facts import architectures, build_part

DEVIATION = 0.02  # of the random weights
SHARD = "2GB"  # per file: published models are sharded too
LETTERS = [chr(code) for code in range(32, 127)]


def tokenizer(tokens: int, begin: int | None, end: int, padding: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character and special ids of the text encoder; `begin`: None without one."""
    special = {"<pad>": padding, "</s>": end} | ({} if begin is None else {"<s>": begin})
    free = (number for number in range(2, 10_000) if number not in special.values())
    vocabulary = {letter: next(free) for letter in ["<unk>", *LETTERS]} | special
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    shape = "$A </s>" if begin is None else "<s> $A </s>"
    made.post_processor = processors.TemplateProcessing(
        single=shape, special_tokens=[(token, special[token]) for token in ("<s>", "</s>") if token in special]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    names |= {} if begin is None else {"bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=tokens, **names)


def tokenizer_for(encoder: dict[str, Any], tokens: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a text encoder on record: CLIP's begins a text with a token, T5's does not."""
    config = encoder["config"]
    if "bos_token_id" in config:
        return tokenizer(tokens, config["bos_token_id"], config["eos_token_id"], config["pad_token_id"])
    return tokenizer(tokens, None, 1, 0)


@torch.no_grad()
def random_weights(module: torch.nn.Module) -> None:
    """Draw matrices and convolutions; vectors stay as their classes initialise them."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, DEVIATION)


def write_model(
    recipe: str, folder: Path, leave_out: Sequence[str] = (), device: str = "cpu", changes: dict[str, Any] | None = None
) -> None:
    """Write the pipeline of `recipe` in bf16 into `folder`, a component at a time, without those of `leave_out`.

    `changes`: of the configurations, by component. `device`: where weights are drawn.
    """
    torch.manual_seed(0)
    record = architectures()
    model = record["models"][compose_run([f"experiment={recipe}"]).config.model.path]
    components: dict[str, Any] = {}
    parts = {name: record["parts"][v] if isinstance(v, str) else v for name, v in model["components"].items()}
    for name, part in parts.items():
        encoder = name.replace("tokenizer", "text_encoder")
        if name in leave_out or encoder in leave_out or not isinstance(part, dict):
            components[name] = None if isinstance(part, dict) else part
        elif "tokens" in part:
            components[name] = tokenizer_for(parts[encoder], part["tokens"])
        else:
            made = part | {"config": part["config"] | (changes or {}).get(name, {})}
            components[name] = build_part(made, torch.bfloat16, device)
            if isinstance(components[name], torch.nn.Module):
                random_weights(components[name])
                components[name].to("cpu")
    getattr(diffusers, model["pipeline"])(**components).save_pretrained(folder, max_shard_size=SHARD)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="sd35_medium_ocr")
    parser.add_argument("--leave-out", nargs="*", default=["text_encoder_3"], metavar="COMPONENT")
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_model(args.recipe, args.folder, args.leave_out, device)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
