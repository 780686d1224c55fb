"""Workflows for ComfyUI that sample with a LoRA, in API format.

Sources of nodes, file names, shifts and schedules: ComfyUI's own templates (github.com/Comfy-Org/workflow_templates,
templates/default.json at commit 01d7404, flux_dev_full_text_to_image.json at 0de266f, image_qwen_image.json at 099db66,
01_qwen_t2i_subgraphed.json at 3b370ad, image_z_image.json at d1170b6) and examples
(github.com/comfyanonymous/ComfyUI_examples, sd3/README.md at 2782d09). For Qwen-Image they use 8-bit
files; here the bf16 files of the same repository are used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Node = dict[str, Any]
Link = list[str | int]  # name of a node and index of its output


@dataclass(frozen=True)
class Family:
    """Nodes and usual file names of a family of base models.

    loads: `checkpoint` for a single file, or `parts`. guided: use of the guidance scale, as `cfg`, or `embedded` as an
    input of the denoiser. above: cfg minus the pipeline's guidance; 1 if the pipeline counts from 0 (no guidance).
    shift: of ModelSamplingAuraFlow, if used.
    """

    loads: Literal["checkpoint", "parts"]
    model: str
    text_encoders: Sequence[str] = ()
    kind: str | None = None  # type of text encoders, for CLIPLoader and DualCLIPLoader
    vae: str | None = None
    latents: str = "EmptySD3LatentImage"
    guided: Literal["cfg", "embedded"] = "cfg"
    guidance: str = "guidance_scale"  # argument of the pipeline
    above: float = 0.0
    shift: float | None = None
    sampler: Sequence[str] = ("euler", "simple")


TABLE = yaml.safe_load(Path(__file__).with_name("comfyui.yaml").read_text())
FAMILIES = {pipeline: Family(**values) for pipeline, values in TABLE["families"].items()}
LOADERS = {1: "CLIPLoader", 2: "DualCLIPLoader", 3: "TripleCLIPLoader"}


def workflow(pipeline: str, base: str, lora: str, prompt: str, call: Mapping[str, Any]) -> dict[str, Node] | None:
    """Return the graph that samples `prompt` with the file `lora` at strength 1; None if the pipeline is unknown.

    pipeline: its diffusers class. base: its Hub id or name. call: arguments of the pipeline's call.
    """
    family = FAMILIES.get(pipeline)
    if family is None:
        return None
    nodes, model, clip, vae = _loaders(family, TABLE["files"].get(base, family.model))
    nodes["lora"] = _node("LoraLoaderModelOnly", model=model, lora_name=lora, strength_model=1.0)
    model = ["lora", 0]
    if family.shift is not None:
        nodes["shift"] = _node("ModelSamplingAuraFlow", model=model, shift=family.shift)
        model = ["shift", 0]
    nodes["prompt"] = _node("CLIPTextEncode", clip=clip, text=prompt)
    nodes["negative"] = _node("CLIPTextEncode", clip=clip, text=str(call.get("negative_prompt") or ""))
    guidance = float(call.get(family.guidance) or 1.0 - family.above) + family.above
    positive = "prompt"
    if family.guided == "embedded":
        nodes["guidance"] = _node("FluxGuidance", conditioning=["prompt", 0], guidance=guidance)
        guidance, positive = 1.0, "guidance"
    height, width = (int(call.get(name) or 1024) for name in ("height", "width"))
    nodes["latents"] = _node(family.latents, width=width, height=height, batch_size=1)
    sampler, scheduler = family.sampler
    nodes["sampler"] = _node(
        "KSampler",
        model=model, positive=[positive, 0], negative=["negative", 0], latent_image=["latents", 0],
        seed=0, steps=int(call.get("num_inference_steps") or 28), cfg=guidance,
        sampler_name=sampler, scheduler=scheduler, denoise=1.0,
    )  # fmt: skip
    nodes["decode"] = _node("VAEDecode", samples=["sampler", 0], vae=vae)
    nodes["save"] = _node("SaveImage", images=["decode", 0], filename_prefix="gerl")
    return nodes


def _loaders(family: Family, file: str) -> tuple[dict[str, Node], Link, Link, Link]:
    """Return the nodes that load the base, and the outputs for denoiser, text encoders and VAE."""
    nodes: dict[str, Node] = {}
    if family.loads == "checkpoint":
        nodes["base"] = _node("CheckpointLoaderSimple", ckpt_name=file)
    else:
        nodes["base"] = _node("UNETLoader", unet_name=file, weight_dtype="default")
    clip: Link = ["base", 1]
    if names := family.text_encoders:
        single = len(names) == 1
        inputs = {"clip_name" if single else f"clip_name{i}": name for i, name in enumerate(names, start=1)}
        inputs |= {} if family.kind is None else {"type": family.kind}
        nodes["text encoders"] = _node(LOADERS[len(names)], **inputs)
        clip = ["text encoders", 0]
    vae: Link = ["base", 2]
    if family.vae is not None:
        nodes["vae"] = _node("VAELoader", vae_name=family.vae)
        vae = ["vae", 0]
    return nodes, ["base", 0], clip, vae


def _node(kind: str, **inputs: Any) -> Node:
    return {"class_type": kind, "inputs": inputs}
