"""Scorers based on the BLIP encoders of transformers: ImageReward, and BLIP-VQA of T2I-CompBench."""

import importlib.util
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, require
from gerl.utils.tensors import tensors_of
from reward_models.scorers.networks import (
    PIXEL_MEAN,
    PIXEL_STD,
    NetworkScorer,
    expanded,
    hub_file,
    in_batches,
    linear_head,
    loading,
    normalised,
    pretrained,
    read_tensors,
    shorter_side,
)

if TYPE_CHECKING:
    from transformers import BlipForQuestionAnswering, BlipTextConfig, BlipVisionConfig, PreTrainedTokenizerBase

BERT = "google-bert/bert-base-uncased"
TOKENS = 35  # maximum length of a prompt or a question

# --- BLIP's image encoder from the original checkpoint

# names in the original checkpoint -> names in transformers' BlipVisionModel; those of the text encoder are identical
VISION_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm(\d)\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _vision_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the tensors of an image encoder to transformers' names."""
    renamed = {}
    for name, value in tensors.items():
        for pattern, replacement in VISION_NAMES:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def _vision_config(tensors: dict[str, torch.Tensor]) -> "BlipVisionConfig":
    """Infer the configuration of the image encoder from its tensors; the checkpoint does not contain one."""
    import transformers

    positions, width = tensors["pos_embed"].shape[1:]
    patch = tensors["patch_embed.proj.weight"].shape[-1]
    return transformers.BlipVisionConfig(
        hidden_size=width,
        intermediate_size=tensors["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
        num_attention_heads=width // 64,  # in BLIP's base and large encoder alike
        image_size=math.isqrt(positions - 1) * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,  # BLIP's value; transformers' default is 1e-5
    )


def _tokenizer(source: str) -> "PreTrainedTokenizerBase":
    import transformers

    with loading("tokenizer", source, "a BERT tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(expanded(source))


# --- ImageReward: predicted human rating of an image for its prompt
#
# Source: "ImageReward: Learning and Evaluating Human Preferences for Text-to-Image Generation" (arXiv 2304.05977) and
# its code (github.com/THUDM/ImageReward): a BLIP image encoder, a BERT with cross-attention from prompt to image, and a
# linear head on its first token. Built here from the BLIP modules of transformers, because the package does not run
# with current releases. Compared with the modules of that package (image-reward 1.5) at small sizes with random
# weights; the published checkpoint itself has not been run.

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output over the authors' data


@dataclass(frozen=True, kw_only=True)
class ImageReward(NetworkScorer):
    """Standardised human rating, about -2 to 2. Prompts are truncated to 35 tokens, images center-cropped to a square.

    `model` is a Hub repository or a local folder with the original ImageReward.pt and med_config.json, `tokenizer` the
    tokenizer of the BERT it was trained with.
    """

    model: str = "THUDM/ImageReward"
    tokenizer: str = BERT

    differentiable = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        network = self._network

        def ratings(images: list[Image.Image], prompts: list[str]) -> torch.Tensor:
            pixels = torch.stack([preprocess(image, network.image_size) for image in images])
            rated: torch.Tensor = network(pixels, *self._tokens(prompts))
            return rated

        return in_batches(self.batch_size, ratings, images, prompts).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        network = self._network
        images = shorter_side(images, size := network.image_size)
        top, left = (round((side - size) / 2) for side in images.shape[2:])
        pixels = normalised(images[:, :, top : top + size, left : left + size], PIXEL_MEAN, PIXEL_STD)
        ratings: torch.Tensor = network(pixels, *self._tokens(prompts))
        return ratings

    @cached_property
    def _network(self) -> "ImageRewardNetwork":
        device, dtype = self.placement
        weights, config = (hub_file("model", self.model, file) for file in ("ImageReward.pt", "med_config.json"))
        with loading("model", self.model, "ImageReward with its med_config.json"):
            text = json.loads(Path(config).read_text())
        network = ImageRewardNetwork(read_tensors("model", weights), text, self.model).eval().to(device)
        for encoder in (network.vision, network.text):  # the head stays in fp32
            encoder.to(dtype=dtype)
        return network.requires_grad_(False)

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        return _tokenizer(self.tokenizer)

    def _tokens(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and mask, both `[B, tokens]`."""
        inputs = self._tokenizer(prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        return inputs["input_ids"], inputs["attention_mask"]


class ImageRewardNetwork(torch.nn.Module):
    """Network of an ImageReward checkpoint with the original tensor names and sizes.

    `text` is the content of the original med_config.json.

    Raises:
        RewardError: tensors are missing or have unexpected shapes.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], text: Mapping[str, object], source: str) -> None:
        super().__init__()
        import transformers

        vision_tensors, text_tensors, head = (
            _part(tensors, f"{name}.") for name in ("blip.visual_encoder", "blip.text_encoder", "mlp")
        )
        text_tensors.pop("embeddings.position_ids", None)  # 0, 1, 2, ...: a buffer, not a weight
        with loading("model", source, "ImageReward with its med_config.json"):
            vision_config = _vision_config(vision_tensors)
            self.image_size: int = vision_config.image_size
            self.vision = transformers.BlipVisionModel(vision_config)
            self.vision.load_state_dict(_vision_tensors(vision_tensors))
            text_config = _text_config(text, vision_config.hidden_size)
            self.text = transformers.BlipTextModel(text_config, add_pooling_layer=False)
            self.text.load_state_dict(text_tensors)
        self.head = linear_head(head, text_config.hidden_size, source)

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return ratings `[B]`, fp32, of pixels `[B, 3, size, size]`, given token ids and mask `[B, tokens]`."""
        device, dtype = self.vision.device, self.vision.dtype
        seen = self.vision(pixels.to(device, dtype)).last_hidden_state
        read = self.text(ids.to(device), attention_mask=mask.to(device), encoder_hidden_states=seen)
        ratings: torch.Tensor = self.head(read.last_hidden_state[:, 0].float()).squeeze(-1)
        return (ratings - MEAN) / STD


def _text_config(text: Mapping[str, object], vision_width: int) -> "BlipTextConfig":
    import transformers

    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
    sizes = {name: text[name] for name in f"{names} hidden_act layer_norm_eps pad_token_id".split()}
    # is_decoder adds cross-attention to the layers; causal masking is an argument of forward
    return transformers.BlipTextConfig(**sizes, encoder_hidden_size=vision_width, is_decoder=True)


def preprocess(image: Image.Image, size: int) -> torch.Tensor:
    """Return pixels `[3, size, size]`: shorter side resized to `size`, center-cropped, normalised as for CLIP.

    Rounds like torchvision's Resize and CenterCrop, which the original uses.
    """
    short = min(image.size)
    width, height = (int(size * side / short) for side in image.size)
    resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return normalised(tensors_of([resized.crop((left, top, left + size, top + size))]), PIXEL_MEAN, PIXEL_STD)[0]


# --- BLIP-VQA: whether each noun phrase of the prompt (object with colour, shape or texture) is in the image
#
# Source: "T2I-CompBench" (arXiv 2307.06350) and its code (github.com/Karine-Huang/T2I-CompBench, commit 1b70949,
# BLIPvqa_eval/BLIP_vqa.py and models/blip_vqa.py, vqa_prob): spaCy extracts the noun phrases, BLIP is asked "PHRASE?",
# and the probabilities of yes against no are multiplied. Unlike the authors' code, probabilities are not rounded to
# four digits. BLIP is the implementation of transformers: `Salesforce/blip-vqa-capfilt-large` has the authors' weights,
# converted for 384x384 images; the authors' code uses 480x480, as is done here with their original file. At small sizes
# with random weights the scores were compared with the authors' modules, with both forms of weights; the published
# weights have not been run by this project.

PLACES = ("top", "the side", "the left", "the right")  # noun phrases asked about
MOST = 8  # maximum length of a question
WORDS = 50  # of a question
DROPPED = re.compile(r'[.!"()*#:;~]')


@dataclass(frozen=True, kw_only=True)
class BlipVqa(NetworkScorer):
    """Product, in [0, 1], of the probabilities that BLIP sees the first eight noun phrases of the prompt.

    A prompt without noun phrases scores 1. `model` is the Hub id or folder of a transformers BLIP for visual question
    answering, or the authors' file model_base_vqa_capfilt_large.pth; `tokenizer` defaults to `model`, for that file to
    google-bert/bert-base-uncased. `spacy_model` is the name of an installed spaCy pipeline that parses English, or its
    folder.
    """

    model: str = "Salesforce/blip-vqa-capfilt-large"
    tokenizer: str | None = None
    spacy_model: str = "en_core_web_sm"

    def __post_init__(self) -> None:
        require("spacy", "compbench")
        if not (Path(self.spacy_model).expanduser().is_dir() or _is_installed(self.spacy_model)):
            raise RewardError(
                f"spacy_model={self.spacy_model} is not installed: run python -m spacy download en_core_web_sm "
                "(its authors do not publish it on PyPI), or give the folder of a spaCy pipeline that parses "
                "English"
            )

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        questions = {prompt: [question(phrase) for phrase in self.phrases(prompt)] for prompt in set(prompts)}
        pairs = [(i, text) for i, prompt in enumerate(prompts) for text in questions[prompt]]
        scores = [1.0] * len(images)
        for start in range(0, len(pairs), self.batch_size):
            batch = pairs[start : start + self.batch_size]
            probabilities = self._network.probabilities([images[i] for i, _ in batch], [text for _, text in batch])
            for (i, _), probability in zip(batch, probabilities, strict=True):
                scores[i] *= probability
        return scores

    def phrases(self, prompt: str) -> list[str]:
        """Return the noun phrases of a prompt that BLIP is asked about."""
        try:
            chunks = [chunk.text for chunk in self._parser(prompt).noun_chunks]
        except ValueError as error:
            raise RewardError(
                f"spacy_model={self.spacy_model} finds no noun phrases, as it has no parser: give a spaCy pipeline "
                "that parses English, such as en_core_web_sm"
            ) from error
        return [phrase for phrase in chunks if phrase not in PLACES][:MOST]

    @cached_property
    def _parser(self) -> Any:
        spacy = require("spacy", "compbench")
        with loading("spacy_model", self.spacy_model, "a spaCy pipeline that parses English"):
            return spacy.load(Path(expanded(self.spacy_model)) if "/" in self.spacy_model else self.spacy_model)

    @property
    def _network(self) -> "BlipNetwork":
        tokenizer = self.tokenizer or (BERT if is_original(self.model) else self.model)
        return _network(self.model, tokenizer, *self.placement)


def question(phrase: str) -> str:
    """Return the question about a noun phrase, normalised like the authors' data loader."""
    return " ".join(DROPPED.sub("", f"{phrase}?".lower()).rstrip(" ").split(" ")[:WORDS])


@dataclass(frozen=True, eq=False)
class BlipNetwork:
    """BLIP for visual question answering with its tokenizer.

    decode, encode: start tokens of an answer and of a question.
    """

    model: "BlipForQuestionAnswering"
    tokenizer: "PreTrainedTokenizerBase"
    dtype: torch.dtype
    decode: int
    encode: int

    def probabilities(self, images: list[Image.Image], questions: list[str]) -> list[float]:
        """Return per question and image the probability of yes against no as the first word of the answer."""
        size = self.model.config.vision_config.image_size
        unique = {id(image): image for image in images}  # encode an image once for all its questions
        places = [list(unique).index(id(image)) for image in images]
        whole = [image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for image in unique.values()]
        pixels = normalised(tensors_of(whole), PIXEL_MEAN, PIXEL_STD)
        with torch.inference_mode():
            seen = self.model.vision_model(pixel_values=pixels.to(self.model.device, self.dtype)).last_hidden_state
        tokens = self.tokenizer(questions, truncation=True, max_length=TOKENS)["input_ids"]
        probabilities_of = [0.0] * len(questions)
        # one length at a time, without padding: transformers 5.23 does not pass the question's mask to the decoder
        for length in set(map(len, tokens)):
            rows = [i for i, ids in enumerate(tokens) if len(ids) == length]
            answers = self._yes(seen[[places[i] for i in rows]], torch.tensor([tokens[i] for i in rows]))
            for i, probability in zip(rows, answers, strict=True):
                probabilities_of[i] = probability
        return probabilities_of

    def _yes(self, seen: torch.Tensor, ids: torch.Tensor) -> list[float]:
        """Return the probability of yes for questions `[B, tokens]` about encoded images `[B, patches, width]`."""
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
    network, words = load_original(model) if is_original(model) else _converted(model), _tokenizer(tokenizer)
    # BLIP's authors add two tokens to BERT's, in this order: [DEC], the start of an answer, and [ENC].
    start = network.config.text_config.bos_token_id
    return BlipNetwork(network.to(device, dtype).eval(), words, dtype, start, start + 1)


def _converted(model: str) -> "BlipForQuestionAnswering":
    """Load a network saved in transformers' format."""
    import transformers

    what = "a transformers BLIP for visual question answering"
    with loading("model", model, what):
        kind = transformers.AutoConfig.from_pretrained(expanded(model)).model_type
    if kind != "blip":
        raise RewardError(f"model={model} is a {kind} model: give {what}, such as Salesforce/blip-vqa-capfilt-large")
    return pretrained(transformers.BlipForQuestionAnswering, model, what)


def _is_installed(name: str) -> bool:
    """Whether a package of this name is installed."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the name has dots or slashes
        return False


# --- BLIP VQA from the original checkpoint, model_base_vqa_capfilt_large.pth
#
# Source: "BLIP" (arXiv 2201.12086) and its code (github.com/salesforce/BLIP), which defines these tensor names. The
# position embeddings of this file are for 480x480 images; transformers' copy of these weights is for 384x384.

WHAT = "the BLIP VQA checkpoint as published by its authors"


def is_original(model: str) -> bool:
    """Whether `model` is a checkpoint file in the original format."""
    return Path(model).suffix == ".pth"


def load_original(model: str) -> "BlipForQuestionAnswering":
    """Load the original checkpoint `model` into the transformers network; raises `RewardError` if it is not one."""
    import transformers

    with loading("model", model, WHAT):
        content = torch.load(expanded(model), map_location="cpu", weights_only=True)
        tensors = content["model"]
        # 0, 1, 2, ...: a buffer, not a weight
        tensors = {name: value for name, value in tensors.items() if not name.endswith(".position_ids")}
    if not any(name.startswith("text_decoder.") for name in tensors):
        raise RewardError(f"model={model} has no answer decoder: give {WHAT}")
    vision = _part(tensors, "visual_encoder.")
    rest = {name: value for name, value in tensors.items() if name.startswith(("text_encoder.", "text_decoder."))}
    with loading("model", model, WHAT):
        network = transformers.BlipForQuestionAnswering(
            transformers.BlipConfig(
                text_config=_text_sizes(_part(tensors, "text_encoder."), vision["pos_embed"].shape[-1]),
                vision_config=_vision_config(vision).to_dict(),
            )
        )
        network.load_state_dict(
            rest | {f"vision_model.{name}": value for name, value in _vision_tensors(vision).items()}
        )
    return network


def _text_sizes(tensors: dict[str, torch.Tensor], vision_width: int) -> dict[str, int]:
    """Infer the sizes of the text encoder from its tensors; the answer decoder has the same sizes."""
    words, width = tensors["embeddings.word_embeddings.weight"].shape
    return {
        "vocab_size": words,
        "bos_token_id": words - 2,  # [DEC], after BERT's words; the last one is [ENC]
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": tensors["encoder.layer.0.intermediate.dense.weight"].shape[0],
        "num_hidden_layers": len({name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}),
        "max_position_embeddings": tensors["embeddings.position_embeddings.weight"].shape[0],
        "encoder_hidden_size": vision_width,
    }
