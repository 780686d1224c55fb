"""Text encoders that are read when they are first needed: where all prompts are kept encoded, never."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from diffusers import DiffusionPipeline

from gerl.config import ModelConfig
from gerl.model.quantisation import quantisation_config, text_encoders

logger = logging.getLogger(__name__)


class LateEncoder(torch.nn.Module):
    """Stands for a text encoder, and reads it when it is called or something inside it is asked for."""

    def __init__(self, skeleton: torch.nn.Module, read: Callable[[], torch.nn.Module], dtype: torch.dtype) -> None:
        """`skeleton`: the encoder without its weights; `read`: the encoder, on the CPU."""
        super().__init__()
        # past `torch.nn.Module`: a pipeline takes the device of its first weights for its own
        self.__dict__ |= {"skeleton": skeleton, "read": read}
        self.__dict__["known"] = {"dtype": dtype, "device": torch.device("cpu"), "config": skeleton.config}

    def forward(self, *args: object, **kwargs: object) -> object:
        """The encoder's answer."""
        return self.loaded()(*args, **kwargs)

    def loaded(self) -> torch.nn.Module:
        """The encoder, read now if it was not."""
        if "encoder" not in self._modules:
            self.encoder = self.read().requires_grad_(False).eval().to(self.known["device"])
        return self.encoder

    def to(self, device: Any, *_: object, **__: object) -> LateEncoder:  # type: ignore[override]
        """Where the encoder will be."""
        self.known["device"] = torch.device(device)
        return super().to(device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "encoder" not in self._modules and (name in self.known or not hasattr(self.skeleton, name)):
                if name in self.known:
                    return self.known[name]
                raise
        return getattr(self.loaded(), name)


def late_encoders(config: ModelConfig, folder: str, dtype: torch.dtype) -> dict[str, LateEncoder]:
    """The text encoders of the pipeline in `folder`, none of them read, which will be as diffusers reads them."""
    index = DiffusionPipeline.load_config(folder)
    encoders_only = ModelConfig(path=config.path, quantize_encoders=config.quantize_encoders)
    quantised = quantisation_config(encoders_only, folder, dtype, lambda _: {})

    def late(name: str) -> LateEncoder:
        kind = getattr(transformers, index[name][1])
        options = {} if quantised is None else {"quantization_config": quantised.quant_mapping[name]}

        def read() -> torch.nn.Module:
            logger.info("loading %s, for a prompt whose embedding is not cached", name)
            encoder: torch.nn.Module = kind.from_pretrained(Path(folder) / name, dtype=dtype, **options)
            return encoder

        with accelerate.init_empty_weights():
            skeleton = kind(kind.config_class.from_pretrained(Path(folder) / name))
        return LateEncoder(skeleton, read, dtype)

    return {name: late(name) for name in text_encoders(folder) if name.startswith("text_encoder")}
