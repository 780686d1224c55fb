"""A causal language model that rewrites prompts: loading, sampling, log-probabilities."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gerl.config import Config
from gerl.errors import ModelError
from gerl.model.components import weights_checked
from gerl.model.loading import precision, weights_fingerprint
from gerl.model.lora import add_lora
from gerl.model.policy import EMA, Policy
from gerl.utils.files import first_line
from gerl.utils.seeding import derive_seed, sample_generators

logger = logging.getLogger(__name__)
PART = "language_model"


class LanguageModel:
    """A causal language model with its tokenizer; texts are sampled at `temperature`, up to `limit` tokens."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float, limit: int
    ) -> None:
        self.model, self.tokenizer, self.temperature, self.limit = model, tokenizer, temperature, limit
        ends = model.generation_config.eos_token_id if model.generation_config is not None else None
        end_ids = [ends] if isinstance(ends, int) else list(ends or [])
        self.ends = {*end_ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}

    def encode(self, request: str) -> torch.Tensor:
        """Return the tokens `[P]` of a request, in the model's chat template if it has one."""
        tokenizer = self.tokenizer
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": request}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        else:
            tokens = tokenizer(request, return_tensors="pt").input_ids[0]
        if not len(tokens):
            raise ModelError(f"the language model's tokenizer reads nothing in {request!r:.80}: change the request")
        return tokens.to(self.model.device)

    @torch.no_grad()
    def sample(self, prompt: torch.Tensor, seeds: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample a text per seed for the request `prompt` `[P]`: tokens `[B, L]` and the mask of those sampled."""
        generators, device = sample_generators(list(seeds)), prompt.device
        inputs, cache = prompt.expand(len(seeds), -1), None
        ended = torch.zeros(len(seeds), dtype=torch.bool)
        tokens, masks = list[torch.Tensor](), list[torch.Tensor]()
        while len(tokens) < self.limit and not ended.all():
            output = self.model(inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            odds = (output.logits[:, -1].float() / self.temperature).softmax(-1).cpu()
            drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(odds, generators, strict=True)]
            new = torch.cat(drawn)
            masks.append(~ended)
            tokens.append(torch.where(ended, 0, new))
            ended = ended | torch.tensor([int(token) in self.ends for token in new])
            inputs = new[:, None].to(device)
        return torch.stack(tokens, 1).to(device), torch.stack(masks, 1).to(device)

    def log_probs(self, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities `[B, L]` of `tokens` after the request `prompt` `[P]`, by one forward pass."""
        whole = torch.cat([prompt.expand(len(tokens), -1), tokens], 1)
        logits = self.model(whole, use_cache=False).logits[:, len(prompt) - 1 : -1]
        return (logits.float() / self.temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    def decode(self, tokens: torch.Tensor, mask: torch.Tensor) -> list[str]:
        """Return the texts of `tokens` `[B, L]`, on one line each."""
        rows = [row[chosen].tolist() for row, chosen in zip(tokens.cpu(), mask.cpu(), strict=True)]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return [" ".join(text.split()) for text in texts]


def load_language_policy(config: Config, device: str, temperature: float, limit: int) -> Policy:
    """Load the language model `model.path` with a LoRA. Raises `ModelError` if it cannot be loaded."""
    model = config.model
    if model.parts:
        raise ModelError(f"model.parts={model.parts}: a language model has no components; remove it")
    try:
        folder = Path(model.path).expanduser()
        path = str(folder) if folder.is_dir() else model.path
        tokenizer = AutoTokenizer.from_pretrained(path)
        with weights_checked():
            loaded = AutoModelForCausalLM.from_pretrained(path, dtype=precision(model, device)).to(device).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model.path={model.path} cannot be loaded as a causal language model of transformers "
            f"({first_line(error)}); give a folder with its tokenizer, or a Hub id"
        ) from None
    seed = derive_seed("lora", config.trainer.seed, PART)
    added = add_lora(loaded, model.lora_rank, model.lora_alpha, model.lora_targets, seed)
    lora = {f"{PART}.{name}": p for name, p in added.items()}
    wrapped = LanguageModel(loaded, tokenizer, temperature, limit)
    denoisers = {PART: loaded}
    return Policy(wrapped, denoisers, lora, EMA(lora, config.actor.ema_decay), weights_fingerprint(denoisers))
