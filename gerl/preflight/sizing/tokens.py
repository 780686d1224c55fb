"""Stand-ins for tokenizers that are not at hand: texts become as many tokens as texts of their length usually do."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchEncoding

CHARACTERS = 4  # of English text in a token


class Tokens:
    """Takes the calls that pipelines make of a tokenizer or a processor, and answers with token ids that mean nothing.

    `model_max_length`: to which length a padded text without `max_length` comes. `end`: the id of the last token.
    """

    def __init__(self, model_max_length: int = 512, end: int = 2) -> None:
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
        *_: Any,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        **__: Any,
    ) -> BatchEncoding:
        rows = [self.encode(t) for t in ([text] if isinstance(text, str) else text)]
        most = max_length or self.model_max_length
        if truncation:
            rows = [row[: most - 1] + row[-1:] if len(row) > most else row for row in rows]
        width = most if padding == "max_length" else max(map(len, rows))
        ids = torch.tensor([row + [self.pad_token_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

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
