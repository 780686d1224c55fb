"""The workflows for ComfyUI: every link leads to an output of the right kind, and every node has what it needs."""

from typing import Any

import pytest

from gerl.export.comfyui import FAMILIES, workflow

# Inputs of each node and the kinds of its outputs, as ComfyUI's nodes.py and comfy_extras define them; a kind in
# capitals comes by a link.
NODES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "CheckpointLoaderSimple": ({"ckpt_name": str}, ["MODEL", "CLIP", "VAE"]),
    "UNETLoader": ({"unet_name": str, "weight_dtype": str}, ["MODEL"]),
    "CLIPLoader": ({"clip_name": str, "type": str}, ["CLIP"]),
    "DualCLIPLoader": ({"clip_name1": str, "clip_name2": str, "type": str}, ["CLIP"]),
    "TripleCLIPLoader": ({"clip_name1": str, "clip_name2": str, "clip_name3": str}, ["CLIP"]),
    "VAELoader": ({"vae_name": str}, ["VAE"]),
    "LoraLoaderModelOnly": ({"model": "MODEL", "lora_name": str, "strength_model": float}, ["MODEL"]),
    "ModelSamplingAuraFlow": ({"model": "MODEL", "shift": float}, ["MODEL"]),
    "CLIPTextEncode": ({"clip": "CLIP", "text": str}, ["CONDITIONING"]),
    "FluxGuidance": ({"conditioning": "CONDITIONING", "guidance": float}, ["CONDITIONING"]),
    "EmptyLatentImage": ({"width": int, "height": int, "batch_size": int}, ["LATENT"]),
    "EmptySD3LatentImage": ({"width": int, "height": int, "batch_size": int}, ["LATENT"]),
    "KSampler": (
        {
            "model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT",
            "seed": int, "steps": int, "cfg": float, "sampler_name": str, "scheduler": str, "denoise": float,
        },
        ["LATENT"],
    ),
    "VAEDecode": ({"samples": "LATENT", "vae": "VAE"}, ["IMAGE"]),
    "SaveImage": ({"images": "IMAGE", "filename_prefix": str}, []),
}  # fmt: skip
CALL = {"height": 512, "width": 768, "num_inference_steps": 12, "guidance_scale": 3.5, "true_cfg_scale": 4.0}


@pytest.mark.parametrize("pipeline", FAMILIES)
def test_every_node_has_its_inputs_and_the_picture_is_drawn_with_the_lora(pipeline: str) -> None:
    graph = workflow(pipeline, "owner/base", "mine.safetensors", "a fox", CALL)
    assert graph is not None
    for node in graph.values():
        wanted, _ = NODES[node["class_type"]]
        assert set(node["inputs"]) == set(wanted)
        for name, kind in wanted.items():
            value = node["inputs"][name]
            if isinstance(kind, str):
                source, output = value
                assert NODES[graph[source]["class_type"]][1][output] == kind
            else:
                assert type(value) is kind
    reached, waiting = set[str](), ["save"]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting += [value[0] for value in graph[name]["inputs"].values() if isinstance(value, list)]
    assert reached == set(graph)  # nothing is left over
    assert graph["lora"]["inputs"]["lora_name"] == "mine.safetensors" and graph["prompt"]["inputs"]["text"] == "a fox"
    sampler, latents = graph["sampler"]["inputs"], graph["latents"]["inputs"]
    assert (sampler["steps"], latents["width"], latents["height"]) == (12, 768, 512)
    cfg = {"FluxPipeline": 1.0, "QwenImagePipeline": 4.0, "ZImagePipeline": 4.5}.get(pipeline, 3.5)
    assert sampler["cfg"] == cfg and graph.get("guidance", {"inputs": {"guidance": 3.5}})["inputs"]["guidance"] == 3.5


@pytest.mark.parametrize("pipeline", ["StableDiffusion3Pipeline", "ZImagePipeline"])
def test_without_guidance_cfg_is_one(pipeline: str) -> None:
    for call in ({}, {"guidance_scale": 0.0}):
        graph = workflow(pipeline, "owner/base", "mine.safetensors", "a fox", call)
        assert graph is not None and graph["sampler"]["inputs"]["cfg"] == 1.0


def test_other_families_have_none() -> None:
    assert workflow("SanaPipeline", "owner/base", "mine.safetensors", "a fox", CALL) is None
    large = workflow("StableDiffusion3Pipeline", "stabilityai/stable-diffusion-3.5-large", "x", "y", {})
    assert large is not None and large["base"]["inputs"]["ckpt_name"] == "sd3.5_large.safetensors"
