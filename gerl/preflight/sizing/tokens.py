"""Stand-ins for tokenizers that are not at hand: texts become as many tokens as texts of their length usually do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import BatchEncoding
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

CHARACTERS = 4  # of English text in a token
PLACE = "<|image_pad|>"  # where a text has a picture


@dataclass(frozen=True)
class Picture:
    """How Qwen's processors turn a picture into patches, of which `merge_size` x `merge_size` become a token."""

    token: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def grid(self, picture: Image.Image) -> tuple[int, int]:
        """Rows and columns of patches."""
        factor = self.patch_size * self.merge_size
        height, width = smart_resize(picture.height, picture.width, factor, self.min_pixels, self.max_pixels)
        return height // self.patch_size, width // self.patch_size

    def patches(self, grids: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """The model's arguments for pictures: grey patches `[N, 3 * temporal * patch * patch]`, and their grids."""
        count, size = sum(h * w for h, w in grids), 3 * self.temporal_patch_size * self.patch_size**2
        return {"pixel_values": torch.zeros(count, size), "image_grid_thw": torch.tensor([(1, h, w) for h, w in grids])}


class Tokens:
    """Takes the calls that pipelines make of a tokenizer or a processor, and answers with token ids that mean nothing.

    `model_max_length`: to which length a padded text without `max_length` comes. `end`: the id of the last token.
    `picture`: of a processor that takes pictures.
    """

    def __init__(self, model_max_length: int = 512, end: int = 2, picture: Picture | None = None) -> None:
        self.picture = picture
        self.model_max_length = model_max_length
        self.tokenizer_max_length = model_max_length
        self.padding_side = "right"
        self.pad_token, self.eos_token, self.bos_token, self.unk_token = "<pad>", "<end>", "<begin>", "<unknown>"
        self.pad_token_id, self.eos_token_id, self.bos_token_id, self.unk_token_id = 0, end, 1, 0
        self.tokenizer = self  # of a processor
        self.added_tokens_encoder: dict[str, int] = {}

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """The token ids of a text."""
        return [3] * (len(text) // CHARACTERS) + [self.eos_token_id]

    def __call__(
        self,
        text: Any = None,
        images: Any = None,
        *_: Any,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        **__: Any,
    ) -> BatchEncoding:
        texts = [text] if isinstance(text, str) else list(text)
        pictures: dict[str, torch.Tensor] = {}
        if images is not None and self.picture is not None:
            grids = [self.picture.grid(p) for p in (images if isinstance(images, list | tuple) else [images])]
            pictures = self.picture.patches(grids)
            rows = [self._with_pictures(t, grids[min(i, len(grids) - 1)]) for i, t in enumerate(texts)]
        else:
            rows = [self.encode(t) for t in texts]
        most = max_length or self.model_max_length
        if truncation:
            rows = [row[: most - 1] + row[-1:] if len(row) > most else row for row in rows]
        width = most if padding == "max_length" else max(map(len, rows))
        ids = torch.tensor([row + [self.pad_token_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask, **pictures})

    def _with_pictures(self, text: str, grid: tuple[int, int]) -> list[int]:
        """The token ids of a text, with those of a picture in its place."""
        assert self.picture is not None
        before, *after = text.split(PLACE)
        tokens = [self.picture.token] * (grid[0] * grid[1] // self.picture.merge_size**2)
        return self.encode(before)[:-1] + tokens * len(after) + self.encode("".join(after))

    def apply_chat_template(self, messages: Any, *_: Any, tokenize: bool = True, **options: Any) -> Any:
        """The text of a conversation or of several, or its tokens."""
        several = bool(messages) and isinstance(messages[0], list)
        texts = [_text(conversation) for conversation in (messages if several else [messages])]
        if tokenize:
            return self(texts, **options)
        return texts if several else texts[0]

    def batch_decode(self, ids: Sequence[Any], *_: Any, **__: Any) -> list[str]:
        """A text for each row of ids."""
        return ["" for _ in ids]

    def tokenize(self, text: str, *_: Any, **__: Any) -> list[str]:
        """A text's tokens as texts."""
        return [self.unk_token] * len(self.encode(text))


def _text(value: Any) -> str:
    """The words in a conversation."""
    if isinstance(value, dict):
        return " ".join(_text(v) for k, v in value.items() if k != "type")
    return " ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
