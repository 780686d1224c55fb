"""The block `model`: which pipeline, what of it is trained, and how its weights are kept and computed with."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from gerl.config.choices import Dtype, Offload, Quantisation
from gerl.config.schema import Block, key, main_key
from gerl.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig(Block):
    path: str = main_key("signs", "diffusers pipeline: Hub id, folder, or 'signs' (the small SD3 that ships with gerl)")
    dtype: Dtype = main_key(
        "auto",
        "precision of the frozen weights; auto is bfloat16 on a GPU and float32 on a CPU; LoRA is always float32",
    )
    train: str = key(
        "lora",
        "what to train: lora; full, all weights of the denoisers; or those whose name (denoiser.parameter) matches "
        "this regular expression. Weights trained this way are float32, whatever model.dtype",
    )
    lora_rank: int = main_key(32, "LoRA rank", low=1, high=2**16)
    lora_alpha: float = main_key(64.0, "LoRA alpha: the update is scaled by alpha / rank", above=0)
    lora_targets: str | None = main_key(
        None, "regular expression on names of linear layers; null: attention and feed-forward of the repeated blocks"
    )
    shard: Literal["none", "denoiser", "all"] = key(
        "none",
        "frozen weights sharded among the ranks of a worker (cluster.ranks_per_worker): those of the denoiser, or "
        "of the text encoders as well",
    )
    lora: str | None = key(
        None,
        "a LoRA to start from: Hub id, file, folder or checkpoint, in a layout of gerl.export; the trained LoRA is "
        "initialised from it, with rank at most model.lora_rank",
    )
    merge_lora: bool = key(False, "merge model.lora into the base model, and train a new LoRA on top of it")
    quantize: Quantisation = key(
        "none",
        "frozen weights of the denoisers in 8 or 4 bits: int8 and fp8 (torchao), nf4 (bitsandbytes, GPU only); "
        "layers compute in model.dtype, and the LoRA stays float32",
    )
    quantize_encoders: Quantisation = key("none", "the same for the text encoders")
    offload: Offload = key(
        "none",
        "encoders: text encoders and VAE are on the GPU only while in use, one at a time: some seconds more per "
        "micro-batch of the rollout; blocks: the denoiser's blocks as well: slow, for when nothing else fits",
    )
    gradient_checkpointing: bool = main_key(False, "recompute activations in the backward pass: less memory, more time")
    compile: str | None = key(
        None, "torch.compile backend for the repeated blocks of the denoiser, such as inductor; null: not compiled"
    )
    attention: str | None = key(
        None, "attention backend of diffusers for the denoiser, such as flash or _flash_3_hub; null: torch's own"
    )
    channels_last: bool = key(False, "store the VAE's convolutions channels-last, which is faster on GPUs")

    def check(self) -> None:
        if self.merge_lora and self.lora is None:
            raise ConfigError("model.merge_lora=true: there is no model.lora to merge; set one, or use false")
        if self.merge_lora and self.quantize != "none":
            raise ConfigError(
                f"model.quantize={self.quantize}: weights are quantised on loading, so nothing can be merged into "
                "them; use model.merge_lora=false, or a folder with the merged model as model.path"
            )
        if self.train != "lora":
            self._check_train()
        if self.offload == "blocks":
            self._check_blocks()
        if self.shard != "none":
            self._check_shards()
        self._check_expression("lora_targets", self.lora_targets or "", "null")
        self._check_expression("train", self.train, "lora or full")

    def _check_expression(self, name: str, value: str, other: str) -> None:
        try:
            re.compile(value)
        except re.error as error:
            hint = "write '.*' for any text and a backslash before literal brackets and stars"
            raise ConfigError(
                f"model.{name}={value!r} is not a valid regular expression ({error}): {hint}, or use {other}"
            ) from None

    def _check_train(self) -> None:
        given, remedy = f"model.train={self.train}", "or model.train=lora"
        if not self.train:
            raise ConfigError("model.train='': use lora, full, or a regular expression on the names of weights")
        if self.lora_targets is not None:
            raise ConfigError(
                f"model.lora_targets={self.lora_targets}: with {given} there is no LoRA; remove it, and select the "
                f"weights with model.train, {remedy}"
            )
        if self.lora is not None and not self.merge_lora:
            raise ConfigError(
                f"model.lora={self.lora}: with {given} there is no LoRA to initialise from it; use "
                f"model.merge_lora=true, {remedy}"
            )
        if self.quantize != "none":
            raise ConfigError(
                f"model.quantize={self.quantize}: with {given} the weights are trained, which quantised ones do "
                f"not support; use model.quantize=none, {remedy}"
            )
        if self.offload == "blocks":
            raise ConfigError(
                f"model.offload=blocks: with {given} the weights change, but not their copies on the CPU; use "
                f"model.offload=encoders, {remedy}"
            )
        if self.compile is not None and (self.dtype != "float32" or self.shard != "none"):
            raise ConfigError(
                f"model.compile={self.compile}: with {given} only unsharded float32 weights can be compiled; use "
                "model.dtype=float32 and model.shard=none, or model.compile=null"
            )

    def _check_shards(self) -> None:
        for name, value in (("quantize", self.quantize), ("quantize_encoders", self.quantize_encoders)):
            if value == "nf4":
                raise ConfigError(
                    f"model.{name}=nf4: bitsandbytes stores the scales of a weight separately, so they cannot be "
                    f"sharded; use model.{name}=int8 or fp8, or model.shard=none"
                )

    def _check_blocks(self) -> None:
        if self.quantize != "none":
            raise ConfigError(
                f"model.offload=blocks: weights with model.quantize={self.quantize} cannot be moved while a "
                "gradient needs them; use model.offload=encoders, or model.quantize=none"
            )
        if self.compile is not None:
            raise ConfigError(
                f"model.offload=blocks: model.compile={self.compile} would compile the denoiser without the moves of "
                "its blocks; use model.offload=encoders, or model.compile=null"
            )

    def carried_on(self) -> "ModelConfig":
        """The model of a resumed run, which does not read the LoRA it began with: its checkpoint has what became."""
        return self if self.merge_lora else replace(self, lora=None)
