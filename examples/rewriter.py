"""Train a small language model that rewrites requests for signs, in words that the painter may or may not know.

    python examples/rewriter.py FOLDER

Writes FOLDER/model, a Llama of two layers with its tokenizer, and the prompt files FOLDER/train.txt and FOLDER/val.txt.
The model puts a request such as `write "35" on a red sign` into one of several wordings, each as often as the others;
the signs pipeline that ships with gerl was trained on one of them. docs/episodes.md trains the two together.
"""

import argparse
import logging
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("rewriter")
COLOURS = ("red", "green", "blue", "orange", "purple", "black", "yellow", "white")
REQUEST = 'write "{text}" on a {colour} sign'
WORDINGS = (
    'a {colour} sign that reads "{text}"',  # the signs pipeline was trained on this one
    'a {colour} sign which says "{text}"',
    'the text "{text}" on a {colour} sign',
    '"{text}" in the style of a {colour} sign',
    'a {colour} board with "{text}"',
)
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
SPLIT = r' ?[a-z]+| ?"|[A-Z0-9]|.'  # words and quotes with the space before them, single characters of the text
END = " =>"  # of a request
LONGEST = 6  # characters of a text


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of words and characters, whose tokens join to the text."""
    splitter = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    samples = [line.format(text="A", colour=c) for line in (REQUEST, *WORDINGS) for c in COLOURS]
    words = {part for line in samples for part, _ in splitter.pre_tokenize_str(line)} | {"=", ">", " "}
    tokens = ["<pad>", "</s>", "<unk>", *sorted(words - set(CHARACTERS)), *CHARACTERS]
    found = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    found.pre_tokenizer, found.decoder = splitter, decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def some_text(rng: np.random.Generator) -> str:
    """Return random characters."""
    return "".join(rng.choice(list(CHARACTERS), rng.integers(1, LONGEST + 1)))


def train(steps: int, batch: int, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train the model to put requests into any of the wordings."""
    torch.manual_seed(seed)
    rng, tokens = np.random.default_rng(seed), tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokens), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(1, steps + 1):
        rows = []
        for _ in range(batch):
            known = {"text": some_text(rng), "colour": str(rng.choice(COLOURS))}
            asked = tokens(REQUEST.format(**known) + END).input_ids
            answer = [*tokens(str(rng.choice(WORDINGS)).format(**known)).input_ids, 1]
            rows.append((asked, answer))
        length = max(len(asked) + len(answer) for asked, answer in rows)
        ids, labels = torch.zeros(batch, length, dtype=torch.int64), torch.full((batch, length), -100)
        for row, (asked, answer) in enumerate(rows):
            ids[row, : len(asked) + len(answer)] = torch.tensor(asked + answer)
            labels[row, len(asked) : len(asked) + len(answer)] = torch.tensor(answer)
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            log.info("step %d of %d: loss %.3f", step, steps, float(loss))
    return model, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model, tokens = train(args.steps, args.batch, args.seed)
    model.save_pretrained(args.folder / "model")
    tokens.save_pretrained(args.folder / "model")
    prompts = Path(__file__).resolve().parent.parent / "gerl" / "assets" / "prompts"
    for name in ("train", "val"):
        lines = (prompts / f"signs_{name}.txt").read_text().splitlines()
        parts = [(line.split()[1], line.split('"')[1]) for line in lines]
        asked = [REQUEST.format(colour=colour, text=text) for colour, text in parts if len(text) <= LONGEST]
        (args.folder / f"{name}.txt").write_text("\n".join(asked) + "\n")
    log.info("written: %s", ", ".join(str(args.folder / part) for part in ("model", "train.txt", "val.txt")))


if __name__ == "__main__":
    main()
