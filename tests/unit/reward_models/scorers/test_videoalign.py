import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from tiny_qwen import WIDTH, qwen_folder, whole_model

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.networks import pooled
from reward_models.scorers.videoalign import TOKENS, VideoAlign, chosen_frames

PROMPTS = ["a cat runs", "rain {text_prompt} & wind"]
WORDS = f"""
import no_such_package

DETAILED_PROMPT_WITH_SPECIAL_TOKEN = \"\"\"
Looks: {TOKENS[0]}
Moves: {TOKENS[1]}
Shows {{text_prompt}}: {TOKENS[2]}
\"\"\"
"""
NORM = {"VQ_mean": 0.3, "VQ_std": 2.0, "MQ_mean": -0.2, "MQ_std": 0.5, "TA_mean": 0.1, "TA_std": 4.0}
SETTINGS: dict[str, Any] = {
    "data_config": {
        "max_frame_pixels": 448 * 448, "fps": 2, "num_frames": None, "sample_type": "uniform", "meta_data": "x",
        "prompt_template_type": "detailed_special", "eval_dim": ["VQ", "MQ", "TA"],
    },
    "training_args": {"bf16": True},
    "model_config": {"output_dim": 1, "use_special_tokens": True, "reward_token": "special", "torch_dtype": "bfloat16"},
    "peft_lora_config": {"lora_enable": True, "lora_r": 2, "lora_alpha": 4, "use_rslora": False, "vision_lora": False},
    "inference_config": NORM,
}  # fmt: skip


def video(frames: int, seed: int = 0) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)).resize((60, 40)) for _ in range(frames)]


def write(folder: Path, state: dict[str, torch.Tensor], settings: dict[str, Any]) -> str:
    (folder / "checkpoint-11352").mkdir(parents=True)
    torch.save(state, folder / "checkpoint-11352" / "model.pth")
    (folder / "model_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kwargs of a tiny VideoReward, its whole model with the LoRA in it, tokenizer and saved weights."""
    folder = tmp_path_factory.mktemp("videoalign")
    base = qwen_folder(folder / "base")
    model, tokens = whole_model(base, *TOKENS)
    layers = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    targets = [name for name in layers if "visual" not in name and name != "lm_head"]
    lora = peft.LoraConfig(target_modules=targets, r=2, lora_alpha=4, lora_dropout=0.05, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    # as transformers 4.45, with which it was trained, names them
    state = {
        name.replace("model.model.language_model.", "model.model.").replace("model.model.visual.", "model.visual."): v
        for name, v in wrapped.state_dict().items()
    }
    state["base_model.model.rm_head.weight"] = torch.randn(1, WIDTH)
    assert "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight" in state
    assert "base_model.model.visual.blocks.0.attn.qkv.weight" in state and "base_model.model.lm_head.weight" in state
    (folder / "prompt_template.py").write_text(WORDS)
    kwargs = dict(model=write(folder / "model", state, SETTINGS), base=base, code=str(folder), device="cpu")
    return kwargs, wrapped, tokens, state


@torch.no_grad()
def expected(made: Any, frames: list[Image.Image], prompt: str) -> torch.Tensor:
    """The hidden states [3, width] of the tokens, as the authors' code gets them for an even number of frames."""
    _, wrapped, tokens, _ = made
    pixels = np.stack([np.asarray(f.resize((392, 280), Image.Resampling.BICUBIC)) for f in frames])
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    values = ((pixels / 255 - mean) / std).transpose(0, 3, 1, 2)
    parts = values.reshape(len(frames) // 2, 2, 3, 10, 2, 14, 14, 2, 14).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    patches = torch.tensor(parts.reshape(-1, 3 * 2 * 14 * 14), dtype=torch.float32)
    seen = f"<|vision_start|>{'<|video_pad|>' * (len(patches) // 4)}<|vision_end|>"
    text = f"\nLooks: {TOKENS[0]}\nMoves: {TOKENS[1]}\nShows {prompt}: {TOKENS[2]}\n"
    ids = tokens(f"<|im_start|>user\n{seen}{text}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")["input_ids"]
    model = wrapped.base_model.model
    embeddings = model.get_input_embeddings()(ids)
    grid = torch.tensor([[len(frames) // 2, 20, 28]])
    embeddings[ids == tokens.convert_tokens_to_ids("<|video_pad|>")] = pooled(model.model.visual(patches, grid))
    hidden = model.model.language_model(inputs_embeds=embeddings).last_hidden_state[0]
    return torch.cat([hidden[ids[0] == tokens.convert_tokens_to_ids(token)] for token in TOKENS])


def normalised(grades: torch.Tensor) -> dict[str, float]:
    parts = {}
    for name, grade in zip(("vq", "mq", "ta"), grades.tolist(), strict=True):
        parts[name] = (grade - NORM[f"{name.upper()}_mean"]) / NORM[f"{name.upper()}_std"]
    return {"overall": sum(parts.values()), **parts}


def test_grades_are_what_the_head_makes_of_the_three_tokens_states(made: Any) -> None:
    kwargs, *_, state = made
    videos = [video(9), video(6, seed=1)]
    seen = [[videos[0][k] for k in (0, 3, 5, 8)], [videos[1][k] for k in (0, 2, 3, 5)]]
    head = state["base_model.model.rm_head.weight"]
    rows = [normalised((expected(made, f, p) @ head.T).flatten()) for f, p in zip(seen, PROMPTS, strict=True)]
    scores = VideoAlign(**kwargs)(videos, PROMPTS, [{}] * 2)
    assert list(scores) == ["overall", "vq", "mq", "ta"]  # the first is the score
    for name, values in scores.items():
        assert values == pytest.approx([row[name] for row in rows], abs=1e-4)
    assert abs(scores["overall"][0] - scores["overall"][1]) > 1e-2


def test_a_head_with_three_numbers_gives_one_to_each_token(made: Any, tmp_path: Path) -> None:
    kwargs, *_, state = made
    head = torch.randn(3, WIDTH)
    settings = {**SETTINGS, "model_config": {**SETTINGS["model_config"], "output_dim": 3}}
    model = write(tmp_path, {**state, "base_model.model.rm_head.weight": head}, settings)
    scores = VideoAlign(**kwargs | {"model": model})([video(4)], ["a"], [{}])
    wanted = normalised((expected(made, video(4), "a") * head).sum(-1))
    assert {name: values[0] for name, values in scores.items()} == pytest.approx(wanted, abs=1e-4)


def test_a_score_depends_on_frames_their_order_and_the_prompt_and_on_nothing_else(made: Any) -> None:
    scorer = VideoAlign(**made[0])
    one, other = video(4), [frame.resize((50, 70)) for frame in video(12, seed=1)]
    together = scorer([one, other], ["a", "a longer prompt"], [{}] * 2)["overall"]
    alone = [scorer([v], [p], [{}])["overall"][0] for v, p in ((one, "a"), (other, "a longer prompt"))]
    assert together == pytest.approx(alone, abs=1e-4)
    changed = scorer([one[::-1], one], ["a", "b"], [{}] * 2)["overall"]
    assert min(abs(score - together[0]) for score in changed) > 1e-3


@pytest.mark.parametrize(
    ("count", "fps", "chosen"),
    [
        (81, 16, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),  # Wan 2.1's five seconds: 10.1 frames
        (49, 8, [0, 4, 9, 13, 17, 22, 26, 31, 35, 39, 44, 48]),
        (5, 16, [0, 1, 3, 4]),
        (3, 16, [0, 2]),
        (2, 1, [0, 1]),
    ],
)
def test_two_frames_a_second_are_seen_and_at_least_four(count: int, fps: float, chosen: list[int]) -> None:
    assert chosen_frames(count, fps, 2.0) == chosen


def test_no_more_frames_are_seen_than_the_model_takes() -> None:
    assert len(chosen_frames(5000, 1, 2.0)) == 768


def test_without_a_normalisation_the_grades_are_as_the_head_gives_them(made: Any, tmp_path: Path) -> None:
    kwargs, *_, state = made
    plain = {name: value for name, value in SETTINGS.items() if name != "inference_config"}
    model = write(tmp_path, state, plain)
    grades = expected(made, video(4), "a") @ state["base_model.model.rm_head.weight"].T
    assert VideoAlign(**kwargs | {"model": model})([video(4)], ["a"], [{}])["overall"][0] == pytest.approx(
        float(grades.sum()), abs=1e-4
    )


@pytest.mark.parametrize(
    ("block", "change", "message"),
    [
        (
            "data_config",
            {"sample_type": "multi_pts"},
            r"data_config\.sample_type in its model_config\.json is unsupported",
        ),
        ("data_config", {"num_frames": 8}, r"data_config\.num_frames"),
        ("model_config", {"reward_token": "last"}, r"model_config\.reward_token"),
        ("model_config", {"output_dim": 3}, r"expected rm_head\.weight of the shape \[3, 16\], got \[1, 16\]"),
        ("peft_lora_config", {"lora_r": 3}, r"has the shape \[2, 16\], expected \[3, 16\]"),
        ("peft_lora_config", {"lora_enable": False}, r"base_layer.* more tensors are only in one"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    made: Any, tmp_path: Path, block: str, change: dict[str, Any], message: str
) -> None:
    kwargs, *_, state = made
    model = write(tmp_path, state, {**SETTINGS, block: {**SETTINGS[block], **change}})
    with pytest.raises(RewardError, match=message):
        VideoAlign(**kwargs | {"model": model})([video(2)], ["a"], [{}])


def test_pictures_videos_of_one_frame_and_prompts_with_marks_are_refused(made: Any) -> None:
    scorer = VideoAlign(**made[0])
    with pytest.raises(RewardError, match="grades videos and got an image: use hpsv3"):
        scorer([video(1)[0]], ["a"], [{}])
    with pytest.raises(RewardError, match=r"a video of 1 frame .*at least 2"):
        scorer([video(1)], ["a"], [{}])
    with pytest.raises(DataError, match=r"prompt 0: .*contains '<\|VQ_reward\|>'"):
        scorer.check_prompts([Prompt(0, "<|VQ_reward|>")])


def test_the_words_are_those_of_the_authors_code_which_is_not_run(made: Any, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"clone github\.com/KwaiVGI/VideoAlign, and give its folder as code"):
        VideoAlign()
    (tmp_path / "prompt_template.py").write_text(WORDS.replace(TOKENS[1], TOKENS[0]))
    with pytest.raises(RewardError, match=r"must have one <\|VQ_reward\|>, one <\|MQ_reward\|>"):
        VideoAlign(code=str(tmp_path))


@pytest.mark.usefixtures("hub")
def test_what_cannot_be_downloaded_is_named(made: Any) -> None:
    with pytest.raises(RewardError, match=r"^model=KwaiVGI/VideoReward cannot be loaded .*model_config\.json"):
        VideoAlign(code=made[0]["code"], device="cpu")([video(2)], ["a"], [{}])
