"""Text to image: Stable Diffusion, FLUX, Qwen-Image and others."""

from typing import Any

import tiny
import torch
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen
from newer import diffusers, transformers
from tiny import JOINT, LATENTS, NARROW, ONE_LAYER, dynamic, euler, image_vae, pipeline, vae, video_vae
from zoo.base import LONG, MEDIUM, NEGATIVE, SHORT, T2I, TWO_LAYERS, Entry, as_class, scale, true_cfg

LANGUAGE: dict[str, Any] = tiny.LANGUAGE | {"intermediate_size": 16, "num_key_value_heads": 1, "head_dim": 8}
LANGUAGE |= tiny.SPECIAL


def sdxl() -> Any:
    blocks = tiny.UNET | {"transformer_layers_per_block": (1, 2), "attention_head_dim": (2, 4)}
    added = {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 6 * 8 + 16}
    unet = diffusers.UNet2DConditionModel(
        **blocks, **added, cross_attention_dim=32, use_linear_projection=True, addition_embed_type="text_time"
    )
    parts = tiny.ddim(), image_vae(quant=True), tiny.clip(), tiny.clip(projected=True)
    return pipeline(diffusers.StableDiffusionXLPipeline, unet, *parts)


def pixart_sigma() -> Any:
    sizes = NARROW | {"cross_attention_dim": 16, "caption_channels": 32, "sample_size": 8}
    transformer = diffusers.PixArtTransformer2DModel(**sizes, use_additional_conditions=False)
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    return pipeline(diffusers.PixArtSigmaPipeline, transformer, scheduler, image_vae(), tiny.t5())


def flux2_parts() -> tuple[Any, ...]:
    """What FLUX.2 and FLUX.2-klein have in common; the text features of two layers are 16 each."""
    sizes = JOINT | {"in_channels": 16, "joint_attention_dim": 32, "timestep_guidance_channels": 16}
    transformer = diffusers.Flux2Transformer2DModel(**sizes | {"axes_dims_rope": (4, 4, 4, 4)})
    return transformer, dynamic(), tiny.vae(diffusers.AutoencoderKLFlux2, width=8)


def flux2() -> Any:
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 8}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **LANGUAGE}, vision_config=vision, image_token_index=3
    )
    encoder = transformers.Mistral3ForConditionalGeneration(config)
    return pipeline(diffusers.Flux2Pipeline, *flux2_parts(), encoder, words=lambda: tiny.tokenizer(64))


def flux2_klein() -> Any:
    encoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LANGUAGE))
    return pipeline(diffusers.Flux2KleinPipeline, *flux2_parts(), encoder, words=lambda: tiny.tokenizer(64))


def gemma() -> Any:
    return transformers.Gemma2Model(transformers.Gemma2Config(**LANGUAGE))


def sana(guidance_embeds: bool = False) -> Any:
    cross = dict(num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16)
    norm = "rms_norm_across_heads" if guidance_embeds else None
    transformer = diffusers.SanaTransformer2DModel(
        **NARROW, **LATENTS, **cross, sample_size=8, guidance_embeds=guidance_embeds, qk_norm=norm
    )
    blocks = {"block_types": "ResBlock", "layers_per_block": (1, 1, 1), "qkv_multiscales": ((), (), ())}
    blocks |= {"block_out_channels": (8, 8, 8)}
    halves = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in blocks.items()}
    scaling = {"upsample_block_type": "interpolate", "downsample_block_type": "stride_conv"}
    vae = diffusers.AutoencoderDC(**halves, **scaling, latent_channels=4, attention_head_dim=2)
    return pipeline(diffusers.SanaPipeline, transformer, euler(shift=3.0), vae, gemma())


def lumina2() -> Any:
    sizes = dict(hidden_size=24, num_layers=1, num_refiner_layers=1, num_attention_heads=1, num_kv_heads=1)
    rope = dict(axes_dim_rope=(8, 8, 8), axes_lens=(256, 32, 32))
    transformer = diffusers.Lumina2Transformer2DModel(
        **sizes, **rope, sample_size=4, in_channels=4, multiple_of=16, cap_feat_dim=16
    )
    parts = dynamic(), image_vae(), gemma()
    return pipeline(diffusers.Lumina2Pipeline, transformer, *parts, words=lambda: tiny.tokenizer(64))


def cogview4() -> Any:
    sizes = dict(text_embed_dim=16, time_embed_dim=8, condition_dim=4, pos_embed_max_size=8, sample_size=8)
    transformer = diffusers.CogView4Transformer2DModel(**NARROW, **LATENTS, **sizes, rope_axes_dim=(8, 8))
    scheduler = euler(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear")
    parts = scheduler, image_vae(), transformers.GlmModel(transformers.GlmConfig(**LANGUAGE))
    return pipeline(diffusers.CogView4Pipeline, transformer, *parts, words=lambda: tiny.tokenizer(64))


def aura_flow() -> Any:
    layers = dict(num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=2)
    sizes = dict(sample_size=8, joint_attention_dim=32, caption_projection_dim=16, pos_embed_max_size=64)
    transformer = diffusers.AuraFlowTransformer2DModel(**layers, **sizes)
    parts = euler(shift=1.73), image_vae(), tiny.t5(multilingual=True)
    return pipeline(diffusers.AuraFlowPipeline, transformer, *parts)


def chroma() -> Any:
    approximator = dict(approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1)
    transformer = diffusers.ChromaTransformer2DModel(**JOINT, **approximator, in_channels=16, joint_attention_dim=32)
    return pipeline(diffusers.ChromaPipeline, transformer, dynamic(), image_vae(), tiny.t5())


UNBINNED = MEDIUM | {"use_resolution_binning": False, "clean_caption": False}


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEXT: dict[str, Any] = tiny.LANGUAGE | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
TEXT |= {"rope_parameters": ROPE}
VISION: dict[str, Any] = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2)

CONTENT = "{{ messages[0]['content'][0]['text'] }}"


def tokenizer(chat: str = "{{ messages[0]['content'] }}") -> Any:
    """Does for a processor, too, where only text is processed. `chat`: how it writes messages."""
    made = tiny.tokenizer(1024)
    made.chat_template = chat
    return made


def text_config(section: list[int], **sizes: Any) -> dict[str, Any]:
    """Of a vision-language model; `section`: how its rotary embedding is divided."""
    return TEXT | {"rope_parameters": ROPE | {"mrope_section": section}} | sizes


def qwen_2_5_vl(layers: int = 1) -> Any:
    text = text_config([1, 1, 2], num_hidden_layers=layers)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=VISION | {"out_hidden_size": 16})
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen_3_vl(layers: int = 1) -> Any:
    vision = VISION | {"out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = text_config([2, 1, 1], num_hidden_layers=layers, vocab_size=tiny.VOCAB + len(PICTURE_TOKENS))
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **PICTURE_IDS)
    return transformers.Qwen3VLForConditionalGeneration(config)


PICTURE_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"]
PICTURE_IDS = {"image_token_id": tiny.VOCAB, "video_token_id": tiny.VOCAB + 1, "vision_start_token_id": tiny.VOCAB + 2}


class PictureProcessor(transformers.Qwen3VLProcessor):
    """Qwen's processor without the video part, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def picture_processor() -> Any:
    """Of Qwen 3; a picture is four tokens at most."""
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": PICTURE_TOKENS})
    pictures = transformers.Qwen2VLImageProcessorPil(patch_size=16, min_pixels=32 * 32, max_pixels=64 * 64)
    return PictureProcessor(pictures, words, chat_template=CONTENT)


def drawn(module: Any, *names: str) -> Any:
    """`module` with the parameters drawn whose names contain one of `names`: in a new model they are zero or unset."""
    for name, parameter in module.named_parameters():
        if any(part in name for part in names):
            torch.nn.init.normal_(parameter, std=0.1)
    return module


def hidream() -> Any:
    sizes = dict(patch_size=2, in_channels=4, num_single_layers=1, axes_dims_rope=(8, 4, 4), max_resolution=(8, 8))
    transformer = diffusers.HiDreamImageTransformer2DModel(
        **ONE_LAYER, **sizes, caption_channels=[32, 16], text_emb_dim=32, llama_layers=[0, 1]
    )
    config = transformers.LlamaConfig(**TEXT | {"num_hidden_layers": 2}, attn_implementation="eager")
    encoders = tiny.clip(projected=True), tiny.clip(projected=True), tiny.t5(), transformers.LlamaForCausalLM(config)
    pipe = pipeline(diffusers.HiDreamImagePipeline, transformer, euler(shift=3.0), vae(), *encoders, words=tokenizer)
    pipe.default_sample_size = 8  # all images have the area of this one
    return pipe


def hunyuan_image() -> Any:
    """Guidance is a component: this one is used where prompts have quoted text."""
    sizes = LATENTS | {"num_single_layers": 1, "num_refiner_layers": 1, "rope_axes_dim": (8, 8)}
    transformer = diffusers.HunyuanImageTransformer2DModel(**ONE_LAYER, **sizes, text_embed_dim=16, text_embed_2_dim=32)
    compression = dict(latent_channels=4, block_out_channels=(32, 32), spatial_compression_ratio=2, sample_size=16)
    image = diffusers.AutoencoderKLHunyuanImage(in_channels=3, out_channels=3, layers_per_block=1, **compression)
    guider = diffusers.guiders.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=0)
    parts = euler(shift=3.0), image, qwen_2_5_vl(layers=2), tiny.t5()
    pipe = pipeline(diffusers.HunyuanImagePipeline, transformer, *parts, words=tokenizer, ocr_guider=guider)
    pipe.tokenizer_max_length = pipe.tokenizer_2_max_length = 12
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "{}", 0
    return pipe


def bria() -> Any:
    transformer = diffusers.BriaTransformer2DModel(**JOINT, in_channels=16, joint_attention_dim=32)
    parts = dynamic(), tiny.image_vae(), tiny.t5()
    return pipeline(diffusers.BriaPipeline, transformer, *parts, words=tokenizer)


def ovis() -> Any:
    sizes = JOINT | {"in_channels": 16, "out_channels": 16, "joint_attention_dim": 16}
    transformer = diffusers.OvisImageTransformer2DModel(**sizes)
    parts = dynamic(), vae(), transformers.Qwen3Model(transformers.Qwen3Config(**TEXT))
    pipe = pipeline(diffusers.OvisImagePipeline, transformer, *parts, words=tokenizer)
    pipe.system_prompt, pipe.user_prompt_begin_id = "", 0
    return pipe


class SmallPreview(transformers.GlmImageProcessor):
    """For one token of preview in place of 256."""

    def _get_target_shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        return height // 32, width // 32, 1, 1


def glm_image() -> Any:
    sizes = ONE_LAYER | LATENTS | {"text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8}
    transformer = diffusers.GlmImageTransformer2DModel(**sizes, prior_vq_quantizer_codebook_size=32)
    config = transformers.GlmImageConfig(
        text_config=text_config([2, 1, 1], vision_vocab_size=32, eos_token_id=2),
        vision_config=VISION | {"image_size": 32},
        vq_config=dict(embed_dim=8, num_embeddings=32, latent_channels=16),
        image_start_token_id=tiny.VOCAB - 1,
        image_end_token_id=tiny.VOCAB - 2,
    )
    prior = transformers.GlmImageForConditionalGeneration(config)
    prior.generation_config.eos_token_id = None
    words = tokenizer(CONTENT)
    words.image_token, words.grid_bos_token, words.grid_eos_token, words.padding_side = "@", "[", "]", "left"
    processor = SmallPreview(transformers.GlmImageImageProcessorPil(), words, words.chat_template)
    parts = euler(shift=3.0), vae(blocks=4), tiny.t5()
    more = {"vision_language_encoder": prior, "processor": processor}
    return pipeline(diffusers.GlmImagePipeline, transformer, *parts, words=tokenizer, **more)


def prx() -> Any:
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4, context_in_dim=32, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=1, axes_dim=[4, 4]
    )
    parts = drawn(transformer, "modulation"), euler(shift=3.0), tiny.image_vae(), tiny.t5()
    pipe = pipeline(diffusers.PRXPipeline, *parts, words=tokenizer)
    pipe.text_preprocessor.clean_text = str  # its own needs ftfy
    return pipe


def kandinsky_5() -> Any:
    sizes = dict(in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=16, time_dim=16, model_dim=16)
    transformer = diffusers.Kandinsky5Transformer3DModel(
        **sizes, ff_dim=32, num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 2, 2)
    )
    parts = drawn(transformer, "modulation"), euler(shift=3.0), vae(blocks=4), qwen_2_5_vl(), tiny.clip(positions=77)
    pipe = pipeline(diffusers.Kandinsky5T2IPipeline, *parts, words=tokenizer)
    pipe.prompt_template, pipe.prompt_template_encode_start_idx = "{}", 0
    pipe.resolutions = [(32, 32)]
    return pipe


def krea_2() -> Any:
    image = ONE_LAYER | {"num_key_value_heads": 1, "intermediate_size": 32, "axes_dims_rope": (4, 6, 6)}
    text = dict(text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2)
    blocks = dict(text_intermediate_size=32, num_layerwise_text_blocks=1, num_refiner_text_blocks=1)
    transformer = diffusers.Krea2Transformer2DModel(**image, **text, **blocks, in_channels=16, timestep_embed_dim=16)
    parts = dynamic(), video_vae(base_dim=4), qwen_3_vl().model
    more = {"words": tokenizer, "text_encoder_select_layers": (0, 1)}
    pipe = pipeline(diffusers.Krea2Pipeline, transformer, *parts, **more)
    pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_start_idx = "", 0
    pipe.prompt_template_encode_suffix, pipe.prompt_template_encode_num_suffix_tokens = ">", 3
    return pipe


class TextOnly(processor_omnigen.OmniGenMultiModalProcessor):
    """Without what OmniGen needs torchvision for: its images."""

    def __init__(self, text_tokenizer: Any, max_image_size: int = 1024) -> None:
        self.text_tokenizer, self.max_image_size = text_tokenizer, max_image_size
        self.collator = processor_omnigen.OmniGenCollator()


def omnigen() -> Any:
    if not hasattr(pipeline_omnigen, "OmniGenMultiModalProcessor"):
        setattr(pipeline_omnigen, "OmniGenMultiModalProcessor", TextOnly)  # noqa: B010
    sizes = dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, num_layers=1)
    positions = dict(max_position_embeddings=1024, original_max_position_embeddings=1024, pos_embed_max_size=4)
    rope = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    transformer = diffusers.OmniGenTransformer2DModel(
        **sizes, **positions, pad_token_id=0, vocab_size=tiny.VOCAB, rope_scaling=rope
    )
    return diffusers.OmniGenPipeline(transformer, euler(), vae(blocks=4), tokenizer())


def nucleus() -> Any:
    sizes = dict(in_channels=16, out_channels=4, joint_attention_dim=16, axes_dims_rope=(4, 4, 8))
    experts = dict(num_experts=4, moe_intermediate_dim=16, capacity_factors=2.0, dense_moe_strategy="all_moe")
    transformer = diffusers.NucleusMoEImageTransformer2DModel(**ONE_LAYER, **sizes, **experts)
    parts = {"transformer": drawn(transformer, "experts"), "scheduler": dynamic(), "vae": video_vae(base_dim=4)}
    words = tokenizer("{{ messages[1]['content'][0]['text'] }}")
    pipe = diffusers.NucleusMoEImagePipeline(**parts, text_encoder=qwen_3_vl(), processor=words)
    pipe.default_return_index = -1
    return pipe


def ernie_image() -> Any:
    sizes = dict(hidden_size=32, num_attention_heads=2, num_layers=1, ffn_hidden_size=32, rope_axes_dim=(4, 6, 6))
    transformer = diffusers.ErnieImageTransformer2DModel(**sizes, in_channels=16, out_channels=16, text_in_dim=16)
    language = transformers.Ministral3Model(transformers.Ministral3Config(**TEXT | {"rope_parameters": None}))
    parts = euler(shift=3.0), vae(diffusers.AutoencoderKLFlux2), language
    denoiser = drawn(transformer, "adaLN_modulation", "final_linear")
    return pipeline(diffusers.ErnieImagePipeline, denoiser, *parts, words=tokenizer)


def longcat() -> Any:
    sizes = {"in_channels": 64, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    transformer = diffusers.LongCatImageTransformer2DModel(**JOINT, **sizes)
    parts = dynamic(), tiny.image_vae(16), qwen_2_5_vl()
    more = {"text_processor": None}  # for the rewriting of prompts, which the call switches off
    pipe = pipeline(diffusers.LongCatImagePipeline, transformer, *parts, words=tokenizer, **more)
    pipe.tokenizer_max_length = 12
    pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_suffix = "<", ">"
    return pipe


def ideogram_4() -> Any:
    sizes = dict(in_channels=16, intermediate_size=32, adaln_dim=16, llm_features_dim=13 * 16, mrope_section=(4, 2, 2))
    transformer, unconditional = (diffusers.Ideogram4Transformer2DModel(**ONE_LAYER, **sizes) for _ in range(2))
    encoder = qwen_3_vl(layers=36).model  # the pipeline reads 13 layers, the last is the 36th
    parts = transformer, euler(), vae(diffusers.AutoencoderKLFlux2), encoder
    more = {"words": lambda: tokenizer(CONTENT), "unconditional_transformer": unconditional}
    return pipeline(diffusers.Ideogram4Pipeline, *parts, **more)


QUOTED = ['a "fox"', '"b"', 'the sign "482"', '"x" y']


def dreamlite(cls: type = diffusers.DreamLitePipeline) -> Any:
    unet = diffusers.DreamLiteUNetModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
        up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        block_out_channels=(16, 32),
        cross_attention_dim=16,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
        transformer_layers_per_block=1,
    )
    blocks = {f"{half}_block_out_channels": (8, 8) for half in ("encoder", "decoder")}
    blocks |= {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    vae = diffusers.AutoencoderTiny(**blocks, latent_channels=4)
    more = {"processor": None}  # of pictures to edit
    parts = {"unet": unet.eval(), "scheduler": euler(), "vae": vae.eval(), "text_encoder": qwen_3_vl(layers=2).eval()}
    pipe = cls(**parts, tokenizer=tokenizer(), **more)
    pipe.prompt_template_encode_generate, pipe.prompt_template_encode_generate_start_idx = "{}", 0
    return pipe


def sana_sprint() -> Any:
    return as_class(sana(guidance_embeds=True), diffusers.SanaSprintPipeline, scheduler=diffusers.SCMScheduler())


class Unchecked:
    """In the place of a safety checker of several gigabytes."""

    def to(self, device: Any) -> None:
        del device

    def check_text_safety(self, prompt: str) -> bool:
        return bool(prompt)

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def cosmos2() -> Any:
    sizes = tiny.ONE_LAYER | tiny.LATENTS | {"text_embed_dim": 32, "adaln_lora_dim": 4, "max_size": (4, 16, 16)}
    transformer = diffusers.CosmosTransformer3DModel(**sizes, concat_padding_mask=False, extra_pos_embed_type=None)
    parts = tiny.euler(use_karras_sigmas=True), tiny.video_vae(diffusers.AutoencoderKLWan), tiny.t5()
    return tiny.pipeline(diffusers.Cosmos2TextToImagePipeline, transformer, *parts, safety_checker=Unchecked())


def qwen_image_2_1() -> Any:
    sizes = ONE_LAYER | LATENTS | {"num_layers": 2, "context_in_dim": 16, "axes_dims_rope": (4, 4, 8)}
    transformer = diffusers.QwenImage21Transformer2DModel(**sizes)
    vae = video_vae(diffusers.AutoencoderKLQwenImage21, decoder_base_dim=8, dim_mult=[1] * 5)
    parts = {"transformer": transformer.eval(), "scheduler": dynamic(), "vae": vae.eval()}
    pipe = diffusers.QwenImage21Pipeline(**parts, text_encoder=qwen_3_vl().eval(), processor=picture_processor())
    pipe.prompt_template_t2i, pipe._drop_idx, pipe._img_token_id = "{}", 1, tiny.VOCAB
    pipe.prompt_template_ti2i = "<image1><|vision_start|><|image_pad|><|vision_end|>{}"
    return pipe


ONE_PROMPT: dict[str, Any] = {"call": MEDIUM, "batch": 1, "text": True, "fails": ("encoders",)}
ONE_PROMPT["limit"] = "One prompt a call. The text encoder stays in memory: `__call__` reads its dtype."


ENTRIES: list[Entry] = [
    Entry("StableDiffusionPipeline", T2I, tiny.sd15, **scale(1.0, 5.0, negative=False), kernel="ddim"),
    Entry("StableDiffusionXLPipeline", T2I, sdxl, **scale(1.0, 5.0), kernel="ddim"),
    Entry("PixArtSigmaPipeline", T2I, pixart_sigma, **scale(1.0, 4.5), call=UNBINNED, kernel="ddim"),
    Entry("StableDiffusion3Pipeline", T2I, tiny.sd3, **scale(1.0, 4.5, negative=False), call=SHORT),
    Entry("FluxPipeline", T2I, tiny.flux, **true_cfg(3.0), call=SHORT),
    Entry("Flux2Pipeline", T2I, flux2, call=TWO_LAYERS),
    Entry("Flux2KleinPipeline", T2I, flux2_klein, **scale(1.0, 4.0, negative=False), call=TWO_LAYERS),
    Entry("QwenImagePipeline", T2I, tiny.qwen_image, **true_cfg(4.0)),
    Entry("QwenImage21Pipeline", T2I, qwen_image_2_1, **true_cfg(4.0), size=64),
    Entry("ZImagePipeline", T2I, tiny.z_image, **scale(0.0, 3.0, negative=False)),
    Entry("SanaPipeline", T2I, sana, **scale(1.0, 4.5), call=UNBINNED | {"complex_human_instruction": None}, size=32),
    Entry("Lumina2Pipeline", T2I, lumina2, **scale(1.0, 4.0), call=LONG, size=32),
    Entry("CogView4Pipeline", T2I, cogview4, **scale(1.0, 3.5), call=LONG),
    Entry("AuraFlowPipeline", T2I, aura_flow, **scale(1.0, 3.5), call=MEDIUM),
    Entry("ChromaPipeline", T2I, chroma, **scale(1.0, 5.0), call=MEDIUM),
    Entry("HiDreamImagePipeline", T2I, hidream, **scale(1.0, 5.0), call=MEDIUM),
    Entry(
        "HunyuanImagePipeline",
        T2I,
        hunyuan_image,
        cfg={"prompt": QUOTED, **NEGATIVE},
        limit="With an `ocr_guider` all prompts of a batch must have quoted text, or none: `__call__` chooses one "
        "guider for the whole batch.",
    ),
    Entry("BriaPipeline", T2I, bria, **scale(1.0, 5.0), call=MEDIUM),
    Entry("OvisImagePipeline", T2I, ovis, **scale(1.0, 5.0), call=MEDIUM),
    Entry(
        "GlmImagePipeline",
        T2I,
        glm_image,
        **scale(1.0, 1.5, negative=False),
        call={"prompt": QUOTED},
        size=32,
        limit="An image depends on its batch: `generate_prior_tokens` draws those of all prompts from the seed of the "
        "first generator.",
    ),
    Entry(
        "PRXPipeline",
        T2I,
        prx,
        **scale(1.0, 4.0),
        call={"use_resolution_binning": False},
        limit="With guidance gerl draws and trains one prompt a call: the stock pipeline stops at several, since "
        "`__call__` repeats the timestep twice, not twice per sample.",
        fails=("guided",),
    ),
    Entry(
        "PRXPipeline",
        "text to image (guidance, one prompt)",
        prx,
        **scale(1.0, 4.0),
        call={"use_resolution_binning": False},
        batch=1,
    ),
    Entry("Kandinsky5T2IPipeline", T2I, kandinsky_5, **scale(1.0, 3.5), size=32),
    Entry("Krea2Pipeline", T2I, krea_2, **scale(0.0, 4.5), call=MEDIUM, size=32),
    Entry(
        "OmniGenPipeline",
        T2I,
        omnigen,
        **scale(1.0, 2.5, negative=False),
        size=32,
        limit="Whole batches only: `OmniGenSuScaledRotaryEmbedding.forward` gives every sample the rotary embedding of "
        "the batch's first.",
        fails=("sub_batch", "micro_batch"),
    ),
    Entry("NucleusMoEImagePipeline", T2I, nucleus, **scale(1.0, 4.0), size=32),
    Entry("ErnieImagePipeline", T2I, ernie_image, **scale(1.0, 4.0)),
    Entry("LongCatImagePipeline", T2I, longcat, **scale(1.0, 4.5), call={"enable_prompt_rewrite": False}),
    Entry(
        "Ideogram4Pipeline",
        T2I,
        ideogram_4,
        **scale(1.0, 4.0, negative=False),
        call={"guidance_schedule": None, **MEDIUM},
    ),
    Entry("DreamLitePipeline", T2I, dreamlite, cfg={"guidance_scale": 3.5}, **ONE_PROMPT),
    Entry("DreamLiteMobilePipeline", T2I, lambda: dreamlite(diffusers.DreamLiteMobilePipeline), **ONE_PROMPT),
    Entry(
        "SanaSprintPipeline",
        T2I,
        sana_sprint,
        call={"intermediate_timesteps": None, "use_resolution_binning": False, "complex_human_instruction": None},
        kernel="cps",
        stock_noise=1.0,
        size=32,
        limit="`sampling.kernel=cps`: with `noise_level=1` it is the pipeline's own sampler, which draws new noise at "
        "each step.",
    ),
    Entry("Cosmos2TextToImagePipeline", T2I, cosmos2, **scale(1.0, 4.5)),
]
