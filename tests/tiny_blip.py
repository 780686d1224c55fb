"""A tiny BLIP that answers questions, and a spaCy pipeline that finds noun phrases by a list of words."""

from pathlib import Path

import spacy
import torch
import transformers
from spacy.language import Language
from spacy.tokens import Doc

SIZE = 16
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] yes no a the red blue cat dog mat on of top and ? left".split()
NOUNS = {"cat", "dog", "mat", "top", "left"}


def blip_folder(folder: Path, seed: int = 0) -> str:
    """Random weights and a tokenizer, to which BLIP's own two tokens are the next two."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text = dict(
        **dict(vocab_size=len(WORDS) + 2, max_position_embeddings=40, encoder_hidden_size=16, initializer_range=0.5),
        **dict(pad_token_id=0, bos_token_id=len(WORDS), sep_token_id=3),
    )
    config = transformers.BlipConfig(
        text_config=sizes | text,
        vision_config=sizes | dict(image_size=SIZE, patch_size=8, initializer_range=0.5),
    )
    transformers.BlipForQuestionAnswering(config).save_pretrained(folder)
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return str(folder)


@Language.component("nouns_of_a_list")
def _parse(doc: Doc) -> Doc:
    """Every noun is the root of the words since the last one, which is the parse of a list of things."""
    heads = [next((i for i in range(t.i, len(doc)) if doc[i].text in NOUNS), t.i) for t in doc]
    parts = ["NOUN" if token.text in NOUNS else "DET" for token in doc]
    deps = ["ROOT" if token.text in NOUNS else "det" for token in doc]
    return Doc(doc.vocab, [t.text for t in doc], [bool(t.whitespace_) for t in doc], pos=parts, heads=heads, deps=deps)


def spacy_folder(folder: Path) -> str:
    pipeline = spacy.blank("en")
    pipeline.add_pipe("nouns_of_a_list")
    pipeline.to_disk(folder)
    return str(folder)
