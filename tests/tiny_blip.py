"""A tiny BLIP that answers questions, and a spaCy pipeline that finds noun phrases by a list of words."""

from pathlib import Path

import spacy
import torch
from newer import tokenizer, transformers
from spacy.language import Language
from spacy.tokens import Doc

SIZE = 16
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] yes no a the red blue cat dog mat on of top and ? left".split()
NOUNS = {"cat", "dog", "mat", "top", "left"}


def blip_folder(folder: Path, seed: int = 0) -> str:
    """Random weights and a tokenizer, to which BLIP's own two tokens are the next two."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=1)
    text = dict(
        **dict(vocab_size=len(WORDS) + 2, max_position_embeddings=40, encoder_hidden_size=64, initializer_range=0.3),
        **dict(pad_token_id=0, bos_token_id=len(WORDS), sep_token_id=3),
    )
    config = transformers.BlipConfig(
        text_config=sizes | text,
        vision_config=sizes | dict(image_size=SIZE, patch_size=8, initializer_range=0.3, layer_norm_eps=1e-6),
    )
    transformers.BlipForQuestionAnswering(config).save_pretrained(folder)
    tokenizer(transformers.BertTokenizer, {word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return str(folder)


# Names of transformers' image encoder -> those of BLIP's authors.
NAMES = (
    ("embeddings.class_embedding", "cls_token"),
    ("embeddings.position_embedding", "pos_embed"),
    ("embeddings.patch_embedding", "patch_embed.proj"),
    ("post_layernorm", "norm"),
    ("encoder.layers", "blocks"),
    ("layer_norm", "norm"),
    ("self_attn.projection", "attn.proj"),
    ("self_attn.qkv", "attn.qkv"),
)


def original_file(folder: str, file: Path) -> str:
    """The weights of `folder` in a file of the form that BLIP's authors publish."""
    tensors = {"text_encoder.embeddings.position_ids": torch.arange(40)[None]}
    for name, value in transformers.BlipForQuestionAnswering.from_pretrained(folder).state_dict().items():
        if name.startswith("vision_model."):
            name = name.replace("vision_model", "visual_encoder")
            for ours, theirs in NAMES:
                name = name.replace(ours, theirs)
        tensors[name] = value
    torch.save({"model": tensors}, file)
    return str(file)


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
