"""Tiny pipelines built offline from the real classes of diffusers and transformers, with random weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gerl.utils.imports import importing

with importing():
    import diffusers
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n"]
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Case:
    """A pipeline and the calls that switch its classifier-free guidance on and off."""

    build: Callable[[], Any]
    cfg: dict[str, Any]
    no_cfg: dict[str, Any]
    call: dict[str, Any] = field(default_factory=dict)
    kernel: str = "flow_sde"


def tokenizer(max_length: int = 16) -> PreTrainedTokenizerFast:
    """One token a character, with end-of-text and padding."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *CHARACTERS])}
    t = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    t.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=t, model_max_length=max_length, **special)
    fast.chat_template = CHAT
    return fast


VOCAB = len(CHARACTERS) + 4
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
# sizes that recur: of a language model, of a transformer, of one with two kinds of blocks, with and without a stream of
# their own for the text, and of the latents that it takes and gives
LANGUAGE = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
ONE_LAYER: dict[str, Any] = dict(num_layers=1, num_attention_heads=2, attention_head_dim=16)
NARROW: dict[str, Any] = ONE_LAYER | {"attention_head_dim": 8}
JOINT: dict[str, Any] = ONE_LAYER | {"num_single_layers": 1, "axes_dims_rope": [4, 4, 8]}
LATENTS = dict(in_channels=4, out_channels=4)
UNET: dict[str, Any] = dict(
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
)  # fmt: skip


def clip(projected: bool = False, positions: int = 16) -> Any:
    sizes = LANGUAGE | {"num_hidden_layers": 2, "max_position_embeddings": positions, "projection_dim": 16}
    config = transformers.CLIPTextConfig(**sizes, **SPECIAL)
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def t5(multilingual: bool = False) -> Any:
    sizes = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0)
    if multilingual:
        return transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes))
    return transformers.T5EncoderModel(transformers.T5Config(**sizes))


def vae(cls: type = diffusers.AutoencoderKL, blocks: int = 2, width: int = 4, **more: Any) -> Any:
    """Its images are `2 ** (blocks - 1)` times as wide as its latents."""
    types = {"down_block_types": ("DownEncoderBlock2D",) * blocks, "up_block_types": ("UpDecoderBlock2D",) * blocks}
    sizes = {"block_out_channels": (width,) * blocks, "layers_per_block": 1, "norm_num_groups": width // 2}
    return cls(**{"latent_channels": 4} | types | sizes | more)


def image_vae(channels: int = 4, quant: bool = False) -> Any:
    convolutions = {"use_quant_conv": quant, "use_post_quant_conv": quant}
    return vae(width=8, latent_channels=channels, **convolutions, shift_factor=0.0609, scaling_factor=1.5035).eval()


def video_vae(cls: type = diffusers.AutoencoderKLQwenImage, **more: Any) -> Any:
    """Of Wan, or of Qwen-Image, which has it from Wan; `more` replaces sizes."""
    sizes = dict(base_dim=8, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    return cls(**sizes | more)


def euler(**config: Any) -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def dynamic() -> diffusers.FlowMatchEulerDiscreteScheduler:
    """Shifted by the size of the image."""
    return euler(use_dynamic_shifting=True)


def ddim() -> diffusers.DDIMScheduler:
    return diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)


def pipeline(
    cls: Callable[..., Any],
    denoiser: Any,
    scheduler: Any,
    vae: Any,
    *encoders: Any,
    words: Callable[[], Any] = tokenizer,
    **more: Any,
) -> Any:
    """`cls` of these parts and `more`; `words` makes the tokenizer of each of the text encoders."""
    parts = {"unet" if isinstance(denoiser, diffusers.UNet2DConditionModel) else "transformer": denoiser}
    for number, encoder in enumerate(encoders, 1):
        suffix = f"_{number}" if number > 1 else ""
        parts |= {f"text_encoder{suffix}": encoder, f"tokenizer{suffix}": words()}
    pipe = cls(scheduler=scheduler, vae=vae, **parts | more)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipe


def sd3(layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = NARROW | LATENTS | {"num_layers": layers, "sample_size": 16, "pos_embed_max_size": 16}
    text = dict(joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32)
    transformer = diffusers.SD3Transformer2DModel(**sizes, **text, qk_norm="rms_norm", dual_attention_layers=(0,))
    parts = euler(shift=3.0), image_vae(), clip(projected=True), clip(projected=True), t5()
    return pipeline(diffusers.StableDiffusion3Pipeline, transformer, *parts)


def flux() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        **JOINT, in_channels=16, joint_attention_dim=32, pooled_projection_dim=16, guidance_embeds=True
    )
    return pipeline(diffusers.FluxPipeline, transformer, dynamic(), image_vae(), clip(), t5())


def qwen_image() -> Any:
    torch.manual_seed(0)
    sizes = ONE_LAYER | {"num_layers": 2, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 4, 8)}
    transformer = diffusers.QwenImageTransformer2DModel(**sizes, joint_attention_dim=16)
    parts = dynamic(), video_vae()
    rope = {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16)
    text = LANGUAGE | {"num_key_value_heads": 2, "rope_scaling": rope}
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, vision_start_token_id=VOCAB)
    )
    return pipeline(diffusers.QwenImagePipeline, transformer, *parts, encoder, words=lambda: tokenizer(512))


def z_image() -> Any:
    torch.manual_seed(0)
    sizes = dict(in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16)
    transformer = diffusers.ZImageTransformer2DModel(**sizes, axes_dims=[4, 4, 8], axes_lens=[256, 32, 32])
    for parameter in (p for name, p in transformer.named_parameters() if "pad_token" in name):
        torch.nn.init.normal_(parameter)  # left uninitialised by diffusers
    language = LANGUAGE | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    parts = euler(shift=3.0), image_vae(), transformers.Qwen3Model(transformers.Qwen3Config(**language))
    return pipeline(diffusers.ZImagePipeline, transformer, *parts, words=lambda: tokenizer(512))


def wan() -> Any:
    torch.manual_seed(0)
    sizes = LATENTS | {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32}
    transformer = diffusers.WanTransformer3DModel(
        **sizes, text_dim=32, freq_dim=16, cross_attn_norm=True, rope_max_seq_len=32
    )
    parts = euler(shift=3.0), video_vae(diffusers.AutoencoderKLWan), t5(multilingual=True)
    return pipeline(diffusers.WanPipeline, transformer, *parts)


def sd15() -> Any:
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(**UNET, cross_attention_dim=16, attention_head_dim=2)
    unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return pipeline(diffusers.StableDiffusionPipeline, unet, ddim(), image_vae(quant=True), clip(), **unchecked)


CASES: dict[str, Case] = {
    "sd3": Case(sd3, {"guidance_scale": 4.5}, {"guidance_scale": 1.0}, {"max_sequence_length": 8}),
    "flux": Case(flux, {"true_cfg_scale": 3.0, "negative_prompt": "NEGATIVE"}, {}, {"max_sequence_length": 8}),
    "qwen_image": Case(qwen_image, {"true_cfg_scale": 4.0, "negative_prompt": "NEGATIVE"}, {}),
    "z_image": Case(z_image, {"guidance_scale": 3.0}, {"guidance_scale": 0.0}),
    "wan": Case(wan, {"guidance_scale": 4.5}, {"guidance_scale": 1.0}, {"num_frames": 5, "max_sequence_length": 16}),
    "sd15": Case(sd15, {"guidance_scale": 5.0}, {"guidance_scale": 1.0}, kernel="ddim"),
}  # fmt: skip
PROMPTS = ["a red fox", "blue", "a sign 482", "x y"]
NEGATIVE = ["bad", "", "ugly", "low"]


def call_for(case: Case, guided: bool, steps: int = 4, size: int = 16) -> dict[str, Any]:
    """Keyword arguments of a call with four prompts of different lengths."""
    extra = dict(case.cfg if guided else case.no_cfg)
    if "negative_prompt" in extra:
        extra["negative_prompt"] = list(NEGATIVE)
    arguments: dict[str, Any] = {"prompt": list(PROMPTS), "height": size, "width": size, "num_inference_steps": steps}
    return {**arguments, "output_type": "latent", **case.call, **extra}


def generators(n: int = len(PROMPTS), seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + i) for i in range(n)]


def output_of(output: Any) -> Any:
    """The images, frames or latents of a pipeline's output object."""
    return next(iter(output.values()))


def build(case: Case) -> Any:
    """A fresh pipeline without progress bar and warnings."""
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    pipe = case.build()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoiser_of(pipe: Any) -> Any:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def add_lora(pipe: Any, rank: int = 4) -> list[torch.nn.Parameter]:
    """LoRA with non-zero B on the denoiser's attention, so that replays have something to differ in."""
    from peft import LoraConfig

    denoiser = denoiser_of(pipe)
    denoiser.requires_grad_(False)
    denoiser.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=r".*(to_q|to_k|to_v|to_out\.0)"))
    parameters = [p for p in denoiser.parameters() if p.requires_grad]
    torch.manual_seed(1)
    for p in parameters:
        p.data.normal_(0, 0.2)
    return parameters
