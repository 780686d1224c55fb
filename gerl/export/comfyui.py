"""Workflows for ComfyUI that sample with a LoRA, in API format: `workflow.yaml.j2` with the families of `comfyui.yaml`.

Sources of nodes, file names, shifts and schedules: ComfyUI's own templates (github.com/Comfy-Org/workflow_templates,
templates/default.json at commit 01d7404, flux_dev_full_text_to_image.json at 0de266f, image_qwen_image.json at 099db66,
01_qwen_t2i_subgraphed.json at 3b370ad, image_z_image.json at d1170b6) and examples
(github.com/comfyanonymous/ComfyUI_examples, sd3/README.md at 2782d09). For Qwen-Image they use 8-bit
files; here the bf16 files of the same repository are used.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gerl.utils.pages import render

Graph = dict[str, dict[str, Any]]  # name of a node -> its class and inputs
TABLE = yaml.safe_load(Path(__file__).with_name("comfyui.yaml").read_text())
FAMILIES: dict[str, dict[str, Any]] = {name: TABLE["usual"] | family for name, family in TABLE["families"].items()}


def workflow(pipeline: str, base: str, lora: str, prompt: str, call: Mapping[str, Any]) -> Graph | None:
    """Return the graph that samples `prompt` with the file `lora` at strength 1; None if the pipeline is unknown.

    pipeline: its diffusers class. base: its Hub id or name. call: arguments of the pipeline's call.
    """
    family = FAMILIES.get(pipeline)
    if family is None:
        return None
    text = render(
        "workflow.yaml.j2",
        family=family,
        file=TABLE["files"].get(base, family["model"]),
        lora=lora,
        prompt=prompt,
        negative=str(call.get("negative_prompt") or ""),
        guidance=float(call.get(family["guidance"]) or 1.0 - family["above"]) + family["above"],
        width=int(call.get("width") or 1024),
        height=int(call.get("height") or 1024),
        steps=int(call.get("num_inference_steps") or 28),
    )
    graph: Graph = yaml.safe_load(text)
    return graph
