"""Make images with ranks to train on: the signs model that ships with gerl draws them, an OCR ranks them.

    python examples/ranked_signs.py my_signs
    python -m gerl.trainer.main_flowgrpo algorithm=diffusion_dpo_offline data.train=my_signs/ranked.jsonl

Images of your own need no such script: docs/preferences.md says what the rows of the file are.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

import gerl
from gerl.utils.dataset import load_prompts

CALL = {"height": 32, "width": 96, "num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 1}


def main() -> None:
    """Write `FOLDER/ranked.jsonl` and the images that it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=120, help="how many of the training prompts")
    parser.add_argument("--images", type=int, default=4, help="images of each")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pipe = DiffusionPipeline.from_pretrained(Path(gerl.__file__).parent / "assets" / "signs")
    pipe.set_progress_bar_config(disable=True)
    prompts, count = load_prompts("signs_train")[: options.prompts], options.images
    images = []
    for prompt in prompts:
        generators = [torch.Generator().manual_seed(prompt.id * count + k) for k in range(count)]
        images += pipe([prompt.text] * count, **CALL, generator=generators).images
    found = gerl.score(images, [prompt.text for prompt in prompts for _ in range(count)], "ocr")
    with (options.folder / "ranked.jsonl").open("w") as rows:
        for i, prompt in enumerate(prompts):
            scores = [scored.values["ocr"] for scored in found[i * count : (i + 1) * count]]
            names = [f"{prompt.id}_{k}.png" for k in range(count)]
            for image, name in zip(images[i * count :], names, strict=False):
                image.save(options.folder / name)
            ranks = [1 + sum(other > score for other in scores) for score in scores]
            rows.write(json.dumps({"prompt": prompt.text, "images": names, "ranks": ranks}) + "\n")


if __name__ == "__main__":
    main()
