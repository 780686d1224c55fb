"""Text to image: HiDream, Kandinsky, OmniGen and others."""

from typing import Any

import diffusers
import tiny
import torch
import transformers
from diffusers.guiders import AdaptiveProjectedMixGuidance
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen
from diffusers.pipelines.prx.pipeline_prx import TextPreprocessor
from tiny import JOINT, LATENTS, ONE_LAYER, dynamic, euler, pipeline, vae, video_vae
from zoo.base import MEDIUM, NEGATIVE, T2I, Entry, scale

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
    text = text_config([2, 1, 1], num_hidden_layers=layers)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLForConditionalGeneration(config)


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
    guider = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=0)
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


class NoCleaning(TextPreprocessor):
    """Without what PRX needs ftfy for."""

    def clean_text(self, text: str) -> str:
        return text


def prx() -> Any:
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4, context_in_dim=32, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=1, axes_dim=[4, 4]
    )
    parts = drawn(transformer, "modulation"), euler(shift=3.0), tiny.image_vae(), tiny.t5()
    pipe = pipeline(diffusers.PRXPipeline, *parts, words=tokenizer)
    pipe.text_preprocessor = NoCleaning()
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

ENTRIES: list[Entry] = [
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
]
