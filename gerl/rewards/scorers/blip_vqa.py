"""BLIP-VQA: is each thing that a prompt names, with its colour, shape or texture, in the image?"""

import importlib.util
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, Scorer, require
from gerl.rewards.scorers.clip import Device, expanded, loading, resolve_device, resolve_dtype
from gerl.rewards.scorers.imagereward import PIXEL_MEAN, PIXEL_STD, part, vision_config_of, vision_name

if TYPE_CHECKING:
    from transformers import BlipForQuestionAnswering, PreTrainedTokenizerBase


# --- BLIP-VQA: is each thing that a prompt names, with its colour, shape or texture, in the image?
#
# Source: "T2I-CompBench" (arXiv 2307.06350) and its code (github.com/Karine-Huang/T2I-CompBench, commit 1b70949,
# BLIPvqa_eval/BLIP_vqa.py and models/blip_vqa.py, vqa_prob): spaCy finds the noun phrases, BLIP is asked "PHRASE?", and
# the probabilities of yes against no are multiplied. The authors round each probability to four digits, which is not
# repeated here. BLIP is that of transformers: `Salesforce/blip-vqa-capfilt-large` are the weights that the authors
# load, converted for images of 384 pixels a side, while they show BLIP 480, as is done here with their own file. At
# small sizes with random weights the scores were compared with those of the authors' own modules, of weights in either
# form; the published weights have not been run by this project.

PLACES = ("top", "the side", "the left", "the right")  # are no things
MOST = 8  # noun phrases
BERT = "google-bert/bert-base-uncased"
TOKENS, WORDS = 35, 50  # of a question
DROPPED = re.compile(r'[.!"()*#:;~]')


@dataclass(frozen=True, kw_only=True)
class BlipVqa(Scorer):
    """The product, from 0 to 1, of the probabilities that BLIP sees the first eight noun phrases of the prompt.

    A prompt without any has 1. `model` is the Hub id or the folder of a BLIP for questions in transformers' form, or
    the file model_base_vqa_capfilt_large.pth of BLIP's authors, beside which `tokenizer` (default: that of `model`) is
    google-bert/bert-base-uncased. `spacy_model` is the name of an installed spaCy pipeline that parses English, or its
    folder.
    """

    model: str = "Salesforce/blip-vqa-capfilt-large"
    tokenizer: str | None = None
    spacy_model: str = "en_core_web_sm"
    batch_size: Annotated[int, Field(ge=1)] = 32
    device: Device = "auto"
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        require("spacy", "compbench")
        if not (Path(self.spacy_model).expanduser().is_dir() or _is_installed(self.spacy_model)):
            raise RewardError(
                f"spacy_model={self.spacy_model} is not installed: run python -m spacy download en_core_web_sm "
                "(its authors do not publish it on PyPI), or give the folder of a spaCy pipeline that parses "
                "English"
            )

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        asked = {prompt: [question(phrase) for phrase in self.phrases(prompt)] for prompt in dict.fromkeys(prompts)}
        pairs = [(i, text) for i, prompt in enumerate(prompts) for text in asked[prompt]]
        scores = [1.0] * len(images)
        for start in range(0, len(pairs), self.batch_size):
            batch = pairs[start : start + self.batch_size]
            found = self._network.probabilities([images[i] for i, _ in batch], [text for _, text in batch])
            for (i, _), probability in zip(batch, found, strict=True):
                scores[i] *= probability
        return scores

    def phrases(self, prompt: str) -> list[str]:
        """The noun phrases of a prompt that are asked about."""
        try:
            found = [chunk.text for chunk in self._parser(prompt).noun_chunks]
        except ValueError as error:
            raise RewardError(
                f"spacy_model={self.spacy_model} finds no noun phrases, as it has no parser: give a spaCy pipeline "
                "that parses English, such as en_core_web_sm"
            ) from error
        return [phrase for phrase in found if phrase not in PLACES][:MOST]

    @cached_property
    def _parser(self) -> Any:
        spacy = require("spacy", "compbench")
        with loading("spacy_model", self.spacy_model, "a spaCy pipeline that parses English"):
            return spacy.load(Path(expanded(self.spacy_model)) if "/" in self.spacy_model else self.spacy_model)

    @property
    def _network(self) -> "BlipNetwork":
        device = resolve_device(self.device)
        tokenizer = self.tokenizer or (BERT if is_original(self.model) else self.model)
        return _network(self.model, tokenizer, device, resolve_dtype(self.dtype, device))


def question(phrase: str) -> str:
    """A noun phrase as the authors' reader hands the question about it to BLIP."""
    return " ".join(DROPPED.sub("", f"{phrase}?".lower()).rstrip(" ").split(" ")[:WORDS])


@dataclass(frozen=True, eq=False)
class BlipNetwork:
    """A BLIP for questions with its tokenizer. decode, encode: the tokens that begin an answer, and a question."""

    model: "BlipForQuestionAnswering"
    tokenizer: "PreTrainedTokenizerBase"
    dtype: torch.dtype
    decode: int
    encode: int

    def probabilities(self, images: list[Image.Image], questions: list[str]) -> list[float]:
        """The probability of yes against no as the first word of the answer to each question about its image."""
        size = self.model.config.vision_config.image_size
        unique = {id(image): image for image in images}  # an image is encoded once for all its questions
        places = [list(unique).index(id(image)) for image in images]
        pixels = torch.stack([preprocess(image, size) for image in unique.values()])
        with torch.inference_mode():
            seen = self.model.vision_model(pixel_values=pixels.to(self.model.device, self.dtype)).last_hidden_state
        tokens = self.tokenizer(questions, truncation=True, max_length=TOKENS)["input_ids"]
        found = [0.0] * len(questions)
        # Without padding: the decoder of transformers 5.23 does not pass the mask of the question on.
        for length in set(map(len, tokens)):
            rows = [i for i, ids in enumerate(tokens) if len(ids) == length]
            answers = self._yes(seen[[places[i] for i in rows]], torch.tensor([tokens[i] for i in rows]))
            for i, probability in zip(rows, answers, strict=True):
                found[i] = probability
        return found

    def _yes(self, seen: torch.Tensor, ids: torch.Tensor) -> list[float]:
        """The probability of yes for questions [B, tokens] about encoded images [B, patches, width]."""
        ids = ids.to(seen.device)
        ids[:, 0] = self.encode
        start = torch.full((len(ids), 1), self.decode, device=seen.device)
        with torch.inference_mode():
            read = self.model.text_encoder(input_ids=ids, encoder_hidden_states=seen).last_hidden_state
            logits = self.model.text_decoder(input_ids=start, encoder_hidden_states=read).logits[:, 0]
        words = self.tokenizer.convert_tokens_to_ids(["yes", "no"])
        # all other words cancel out of yes / (yes + no)
        return torch.softmax(logits[:, words].float(), dim=-1)[:, 0].tolist()


@cache
def _network(model: str, tokenizer: str, device: torch.device, dtype: torch.dtype) -> BlipNetwork:
    import transformers

    network = load_original(model) if is_original(model) else _converted(model)
    with loading("tokenizer", tokenizer, "a BERT tokenizer"):
        words = transformers.AutoTokenizer.from_pretrained(expanded(tokenizer))
    # BLIP's authors add two tokens to BERT's, in this order: [DEC], with which an answer begins, and [ENC].
    start = network.config.text_config.bos_token_id
    return BlipNetwork(network.to(device, dtype).eval(), words, dtype, start, start + 1)


def _converted(model: str) -> "BlipForQuestionAnswering":
    """The network in transformers' form."""
    import transformers

    source, what = expanded(model), "a transformers BLIP for visual question answering"
    with loading("model", model, what):
        kind = transformers.AutoConfig.from_pretrained(source).model_type
    if kind != "blip":
        raise RewardError(f"model={model} is a {kind} model: give {what}, such as Salesforce/blip-vqa-capfilt-large")
    with loading("model", model, what):
        network, info = transformers.BlipForQuestionAnswering.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers
        raise RewardError(
            f"model={model} has no weights for {missing[0]} and {len(missing) - 1} more tensors of a BLIP for "
            f"visual question answering: give {what}"
        )
    return network


def preprocess(image: Image.Image, size: int) -> torch.Tensor:
    """Pixels [3, size, size]: resized without regard to the aspect, normalised as for CLIP."""
    small = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    pixels = np.asarray(small, dtype=np.float32) / 255
    return torch.from_numpy((pixels - PIXEL_MEAN) / PIXEL_STD).permute(2, 0, 1)


def _is_installed(name: str) -> bool:
    """Whether there is a package of this name."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a name with dots or slashes
        return False


# --- BLIP for questions from the file that its authors published, model_base_vqa_capfilt_large.pth.
#
# Source: "BLIP" (arXiv 2201.12086) and its code (github.com/salesforce/BLIP), whose names of tensors these are. The
# file has the images' size, 480 pixels a side, in its positions; transformers' copy of these weights was made for 384.

WHAT = "the BLIP VQA checkpoint as published by its authors"


def is_original(model: str) -> bool:
    """Whether `model` is a file of BLIP's authors."""
    return Path(model).suffix == ".pth"


def load_original(model: str) -> "BlipForQuestionAnswering":
    """The network in the file `model`, in transformers' form; raises `RewardError` if it is none."""
    import transformers

    with loading("model", model, WHAT):
        content = torch.load(expanded(model), map_location="cpu", weights_only=True)
        tensors = content["model"]
        # 0, 1, 2, ...: a buffer, not a weight
        tensors = {name: value for name, value in tensors.items() if not name.endswith(".position_ids")}
    if not any(name.startswith("text_decoder.") for name in tensors):
        raise RewardError(f"model={model} has no answer decoder: give {WHAT}")
    vision = part(tensors, "visual_encoder.")
    rest = {name: value for name, value in tensors.items() if name.startswith(("text_encoder.", "text_decoder."))}
    with loading("model", model, WHAT):
        network = transformers.BlipForQuestionAnswering(
            transformers.BlipConfig(
                text_config=_text_sizes(part(tensors, "text_encoder."), vision["pos_embed"].shape[-1]),
                vision_config=vision_config_of(vision).to_dict(),
            )
        )
        network.load_state_dict(rest | {f"vision_model.{vision_name(name)}": value for name, value in vision.items()})
    return network


def _text_sizes(tensors: dict[str, torch.Tensor], vision_width: int) -> dict[str, int]:
    """The sizes of the text encoder, which only its tensors tell; the answers' decoder has the same."""
    words, width = tensors["embeddings.word_embeddings.weight"].shape
    return {
        "vocab_size": words,
        "bos_token_id": words - 2,  # [DEC], behind BERT's words; the last one is [ENC]
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": tensors["encoder.layer.0.intermediate.dense.weight"].shape[0],
        "num_hidden_layers": len({name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}),
        "max_position_embeddings": tensors["embeddings.position_embeddings.weight"].shape[0],
        "encoder_hidden_size": vision_width,
    }
