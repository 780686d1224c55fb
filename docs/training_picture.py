"""Draw the figure of docs/how_training_works.md: `python docs/training_picture.py`; half a minute on two CPU cores.

One group of the signs model: what is sampled, its rewards and advantages, and the ratios before and after one update.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from matplotlib.figure import Figure
from peft import LoraConfig

import gerl

PICTURE = Path(__file__).resolve().parent / "pictures" / "how_training_works.png"
PROMPT, SIZE, SEED, RATE = 'a red sign that reads "OPEN"', 8, 1, 1e-3
CALL = {"height": 32, "width": 96, "num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 1}
WINDOW = [0, 1, 2]  # denoising steps with noise, which are trained
UP, DOWN = "#2a6f97", "#b5523b"


def ratios(pipe: Any, tape: Any, advantages: torch.Tensor, *, train: bool) -> torch.Tensor:
    """Replay the tape: the ratio of every image, mean over its steps; with `train`, gradients of the loss add up."""
    seen = []

    def on_step(k: int, step: Any) -> torch.Tensor:
        ratio = (step.log_prob - step.recorded_log_prob).exp()
        seen.append(ratio.detach())
        return -(advantages * ratio).mean() * train

    gerl.replay(pipe, tape, on_step)
    return torch.stack(seen).mean(0)


def train_once() -> tuple[list[Any], list[torch.Tensor]]:
    """Return the images of a group, and its rewards, advantages, and ratios before and after the update."""
    pipe = DiffusionPipeline.from_pretrained(Path(gerl.__file__).parent / "assets" / "signs")
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.requires_grad_(False)
    torch.manual_seed(SEED)
    pipe.transformer.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    optimizer = torch.optim.AdamW([p for p in pipe.transformer.parameters() if p.requires_grad], lr=RATE)
    generators = [torch.Generator().manual_seed(SEED + i) for i in range(SIZE)]
    call = CALL | {"prompt": [PROMPT] * SIZE}
    output, tape = gerl.record(pipe, call, noise_level=0.7, window=WINDOW, generators=generators)
    rewards = torch.tensor([row.values["ocr"] for row in gerl.score(output.images, [PROMPT] * SIZE, "ocr")])
    advantages = (rewards - rewards.mean()) / rewards.std()
    before = ratios(pipe, tape, advantages, train=True)
    optimizer.step()
    after = ratios(pipe, tape, advantages, train=False)
    return output.images, [rewards, advantages, before, after]


def draw(images: list[Any], numbers: list[torch.Tensor]) -> Figure:
    """The figure: images from the best to the worst, below each its numbers."""
    order = numbers[0].argsort(descending=True, stable=True).tolist()
    rewards, advantages, before, after = (row[order].tolist() for row in numbers)
    assert before == [1.0] * SIZE, "on policy"
    moves = [(ratio - 1) * 1e4 for ratio in after]
    rows = [
        ("1  rollout\nthe group of one prompt", None, ""),
        ("2  reward\nletters read correctly (OCR)", rewards, "{:.2f}"),
        ("3  advantage\n(reward - mean) / deviation", advantages, "{:+.2f}"),
        ("4  ratio in the replay,\nbefore the update", [0.0] * SIZE, "1"),
        ("5  ratio after the update,\ndifference from 1 in 0.0001", moves, "{:+.2f}"),
    ]
    figure = Figure(figsize=(10.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots(len(rows), 1, height_ratios=[1, 1, 1.3, 0.35, 1.3])
    for axis, (title, values, form) in zip(axes, rows, strict=True):
        axis.set(xlim=(-0.6, SIZE - 0.4), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        axis.set_ylabel(title, rotation=0, ha="left", va="center", labelpad=190)
        if values is None:
            for x, i in enumerate(order):
                axis.imshow(images[i], extent=(x - 0.45, x + 0.45, 0, 1), aspect="auto")
            axis.set(xlim=(-0.6, SIZE - 0.4), ylim=(0, 1))
            continue
        axis.bar(range(SIZE), values, 0.55, color=[UP if value >= 0 else DOWN for value in values])
        axis.axhline(0, color="#999999", linewidth=0.8)
        room = 0.45 * max(map(abs, values)) or 1
        axis.set_ylim(min(*values, 0) - (room if min(values) < 0 else 0), max(values) + room)
        for x, value in enumerate(values):
            axis.annotate(form.format(value), (x, value), (0, 2 if value >= 0 else -2), textcoords="offset points",
                          ha="center", va="bottom" if value >= 0 else "top", fontsize=9)  # fmt: skip
    return figure


if __name__ == "__main__":
    draw(*train_once()).savefig(PICTURE, metadata={"Software": None})
