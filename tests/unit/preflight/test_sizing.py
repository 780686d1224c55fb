"""Predictions of memory and work, beside what real runs take and what is published of models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import sizing
import tiny
import torch
import yaml
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from drills import more
from newer import transformers
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from gerl.commandline.composition import compose_run
from gerl.config import Config, ModelConfig, RolloutConfig, SamplingConfig, algorithm_config
from gerl.errors import ModelError
from gerl.model.loading import load_policy
from gerl.model.quantization import stored_bytes
from gerl.preflight.sizing.command import configured
from gerl.preflight.sizing.facts import (
    Facts,
    Part,
    Weights,
    architectures,
    build_part,
    build_pipeline,
    find_facts,
    named_on_record,
    part_of,
)
from gerl.preflight.sizing.facts import recorded as on_record
from gerl.preflight.sizing.hardware import GPUS
from gerl.preflight.sizing.layouts import (
    DRIVER,
    WORKER,
    Batch,
    Layout,
    cheapest,
    largest,
    main_memory,
    memory,
    room,
    seconds,
)
from gerl.preflight.sizing.shape_simulator import PLACE, Ledger, Picture, Tally, Tokens

ROOT = Path(__file__).parents[3]


@more
def test_bytes_and_operations_are_those_of_a_real_run(tmp_path: Path) -> None:
    """A denoiser of 100 M weights, drawn and trained on shapes and for real, without and with checkpointing."""
    config = sizing.config_of_check(sizing.wide(tmp_path / "wide", 1280))
    facts, real = find_facts(config, tmp_path, torch.float32), sizing.real_run(config)
    (denoiser,) = (part for part in facts.parts if part.kind == "denoiser")
    assert 100e6 < denoiser.weights.total / 4 < 400e6
    pairs = [(facts.rollout, real.rollout), *((facts.updates[on], real.updates[on]) for on in (False, True))]
    for found, taken in pairs:
        assert max(found.peaks.values()) == pytest.approx(taken.peak, rel=0.1)
        assert found.total == pytest.approx(taken.flops, rel=1e-3)
    assert Facts.from_json(json.loads(json.dumps(dataclasses.asdict(facts)))) == facts


@more
def test_training_all_weights_takes_what_a_real_run_does(tmp_path: Path) -> None:
    config = sizing.config_of_check(sizing.wide(tmp_path / "wide", 640))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, train="full", lora_targets=None))
    facts, real = find_facts(config, tmp_path, torch.float32), sizing.real_run(config)
    (denoiser,) = (part for part in facts.parts if part.kind == "denoiser")
    assert facts.whole and facts.lora * 4 == denoiser.masters and facts.averages == 1
    for on in (False, True):
        assert max(facts.updates[on].peaks.values()) == pytest.approx(real.updates[on].peak, rel=0.1)
        assert facts.updates[on].total == pytest.approx(real.updates[on].flops, rel=1e-3)
    plain, halves = (memory(facts, layout, Batch(2, 2, 8)) for layout in (Layout(), Layout(2, "denoiser")))
    rest = sum(part.weights.total for part in facts.parts) - denoiser.weights.total
    assert plain.weights - rest == denoiser.masters and halves.weights - rest == denoiser.masters / 2
    assert halves.lora == plain.lora / 2 == facts.lora * 4 * 4 / 2  # gradient, two moments and an average


@pytest.mark.parametrize("training", [False, True])
def test_experts_that_are_routed_by_values_cost_what_they_do(training: bool) -> None:
    """HiDream's feed-forward: two of four experts for each token, in its branch without gradient and in the other."""
    torch.manual_seed(0)
    x = torch.randn(2, 40, 64, requires_grad=training)

    def run(x: torch.Tensor) -> None:
        y = experts(x)
        if training:
            y.backward(torch.ones_like(y))

    experts = MOEFeedForwardSwiGLU(64, 256, 4, 2).requires_grad_(False).eval()
    experts.training = training
    with FlopCounterMode(display=False) as counter:
        run(x)
    with profile(profile_memory=True) as found:
        run(x)
    mode, ledger = FakeTensorMode(allow_non_fake_inputs=True), Ledger()
    fake = mode.from_tensor(x.detach()).requires_grad_(training)
    for name, p in list(experts.named_parameters()):
        owner, _, own = name.rpartition(".")
        experts.get_submodule(owner)._parameters[own] = torch.nn.Parameter(mode.from_tensor(p.detach()), False)
    ledger.leave_out([fake, *experts.parameters()])
    with torch.set_grad_enabled(training), mode, ledger:
        run(fake)
    assert ledger.flops == counter.get_total_flops() > 0
    assert ledger.peak == pytest.approx(sizing.most_alive(found), rel=0.1)


def test_pictures_become_as_many_patches_as_the_processor_makes_of_them() -> None:
    processor = transformers.Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056)
    picture = Image.new("RGB", (500, 333))
    real = processor(images=[picture, picture], return_tensors="pt")
    tokens = Tokens(100, picture=Picture(7, 14, 2, 2, 3136, 12845056))
    ours = tokens(text=[f"a{PLACE}b"] * 2, images=[picture, picture], padding=True, return_tensors="pt")
    assert torch.equal(ours["image_grid_thw"], real["image_grid_thw"])
    assert ours["pixel_values"].shape == real["pixel_values"].shape
    assert int((ours["input_ids"] == 7).sum()) * 4 == len(real["pixel_values"])


# Parameters as published, in billions or, more exactly, by the size of the hub's file: (figure, bytes a parameter)
BILLIONS = 1e9
PUBLISHED: dict[str, tuple[str, float]] = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5/unet": ("0.860", 1),  # CompVis/stable-diffusion, README
    "vae_sd15": ("0.335", 4),  # hub: stabilityai/stable-diffusion-xl-base-1.0, vae; of the same structure
    "vae_sdxl": ("0.335", 4),  # the same file
    "vae_16": ("0.168", 2),  # hub: stabilityai/stable-diffusion-3.5-medium, vae
    "vae_wan": ("0.508", 4),  # hub: StevenZhang/Wan2.1-VAE_Diff
    "vae_qwen": ("0.127", 1),  # Qwen-Image, arXiv 2508.02324, table 1: 54 M + 73 M
    "vae_flux2": ("0.084", 1),  # github.com/black-forest-labs/flux2: as FLUX.1's, with 32 channels
    "dc_ae": ("0.312", 1),  # hub: mit-han-lab/dc-ae-f32c32-sana-1.0
    "clip_l": ("0.123", 1),  # CompVis/stable-diffusion, README
    "clip_l_projected": ("0.247", 2),  # hub: stabilityai/stable-diffusion-3.5-medium, text_encoder
    "clip_g": ("1.39", 2),  # the same, text_encoder_2
    "long_clip_l": ("0.50", 4),  # hub: HiDream-ai/HiDream-I1-Full, text_encoder
    "long_clip_g": ("2.78", 4),  # the same, text_encoder_2
    "t5_xxl": ("9.52", 2),  # hub: stabilityai/stable-diffusion-3.5-medium, text_encoder_3: 4.99 GB + 4.53 GB
    "umt5_xxl": ("11.4", 2),  # hub: Wan-AI/Wan2.1-T2V-14B-Diffusers, text_encoder
    "gemma2_2b": ("10.5", 4),  # hub: Alpha-VLLM/Lumina-Image-2.0, text_encoder: 4.99 GB + 4.98 GB + 0.48 GB
    "qwen3_4b": ("8.05", 2),  # hub: black-forest-labs/FLUX.2-klein-4B, text_encoder
    "qwen3_4b_bare": ("8.05", 2),  # its head is its embedding
    "qwen25_vl_7b": ("16.6", 2),  # hub: Qwen/Qwen2.5-VL-7B-Instruct
    "mistral3_24b": ("24", 1),  # the name of the model
    "llama_31_8b": ("16.1", 2),  # hub: meta-llama/Llama-3.1-8B-Instruct
    "stabilityai/stable-diffusion-xl-base-1.0/unet": ("5.14", 2),  # hub, unet
    "stabilityai/stable-diffusion-3.5-medium/transformer": ("4.94", 2),  # hub, transformer
    "stabilityai/stable-diffusion-3.5-large/transformer": ("8.1", 1),  # its model card
    "black-forest-labs/FLUX.1-dev/transformer": ("23.8", 2),  # hub, transformer
    "black-forest-labs/FLUX.1-Kontext-dev/transformer": ("12", 1),  # its model card
    "black-forest-labs/FLUX.2-dev/transformer": ("32", 1),  # its model card
    "black-forest-labs/FLUX.2-klein-base-4B/transformer": ("4", 1),  # its name
    "HiDream-ai/HiDream-I1-Full/transformer": ("34.2", 2),  # hub, transformer: seven files
    "Qwen/Qwen-Image/transformer": ("20", 1),  # arXiv 2508.02324, table 1
    "Qwen/Qwen-Image-Edit/transformer": ("20", 1),  # the same
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers/transformer": ("1.6", 1),  # SANA 1.5, arXiv 2501.18427
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers/transformer": ("5.68", 4),  # hub, transformer: 1.42 B, in spite of its name
    "Wan-AI/Wan2.1-T2V-14B-Diffusers/transformer": ("28.6", 2),  # hub: Comfy-Org/Wan_2.1_ComfyUI_repackaged
    "Alpha-VLLM/Lumina-Image-2.0/transformer": ("10.4", 4),  # hub, transformer: 9.96 GB + 0.48 GB
    "Tongyi-MAI/Z-Image/transformer": ("6", 1),  # arXiv 2511.22699
}


@pytest.fixture(scope="module")
def weights_on_record() -> dict[str, int]:
    """Parameters of all parts on record, and positions that are fixed and in their files as well."""
    record, found = architectures(), {}
    for model, values in record["models"].items():
        for name, value in values["components"].items():
            part = record["parts"][value] if isinstance(value, str) and value in record["parts"] else value
            key = value if isinstance(value, str) else f"{model}/{name}"
            if isinstance(part, dict) and "class" in part and key not in found and "Scheduler" not in part["class"]:
                module = build_part(part, torch.bfloat16, "meta")
                kept = {id(v): v.numel() for v in module.state_dict(keep_vars=True).values()}
                found[key] = sum(kept.values())
    return found


def test_all_parts_on_record_have_their_published_size(weights_on_record: dict[str, int]) -> None:
    found = weights_on_record
    assert found.keys() == PUBLISHED.keys()
    for name, (figure, size) in PUBLISHED.items():
        digits = len(figure.partition(".")[2])
        # files have a head as well
        assert abs(found[name] * size / BILLIONS - float(figure)) <= 0.6 * 10**-digits, (name, found[name])
    whole = [found[name] for name in ("Qwen/Qwen-Image/transformer", "qwen25_vl_7b", "vae_qwen")]
    assert round(sum(whole) * 2 / BILLIONS, 1) == 57.7  # GB of the hub's Qwen/Qwen-Image


def test_a_table_of_positions_is_loaded_like_weights() -> None:
    """It is computed in fp32; in the file it has the precision of the rest."""
    medium = architectures()["models"]["stabilityai/stable-diffusion-3.5-medium"]["components"]["transformer"]
    transformer = build_part(medium, torch.bfloat16, "meta")
    assert {tensor.dtype for tensor in transformer.state_dict().values()} == {torch.bfloat16}
    assert part_of("transformer", transformer, True).weights.total == 4_939_327_872  # hub, transformer: 4.94 GB


def test_the_folder_that_a_recipe_puts_together_is_on_record() -> None:
    assert named_on_record("./hidream-i1-full") == "HiDream-ai/HiDream-I1-Full"
    known = {*architectures()["models"], "./hidream-i1-full"}
    assert {sizing.config_of(recipe).model.path for recipe in sizing.recipes()} <= known


def test_a_model_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'nobody/model' is not in the Hub cache.*black-forest-labs/FLUX.1-dev"):
        build_pipeline("nobody/model", torch.bfloat16)


def model(billions: float = 10.0) -> Facts:
    """A denoiser of 20 blocks and an encoder, in bf16; an image takes a GB."""
    whole = Weights(int(2e9 * billions), int(1e9 * billions), 1000, int(2e9 * billions))
    block = Weights(int(1e8 * billions), int(5e7 * billions), 50, int(1e8 * billions))
    root = Weights(2 * 10**8)
    parts = [
        Part("transformer", "denoiser", whole, block, Weights(), 10**7, 0),
        Part("text_encoder", "encoder", Weights(22 * 10**8, 10**9, 1000, 2 * 10**9), root, root, 10**6, 2 * 10**8),
    ]
    taken = Tally({"transformer": 10**15}, {"transformer": 10}, {"transformer": 8 * 10**9})
    return Facts("m", "P", "a", "bfloat16", "image", 8, 8, 8, parts, 10**7, 1, False, 1e6, taken, {True: taken})


def test_main_memory_has_a_state_where_it_is_copied_and_sent() -> None:
    facts, batch = model(), Batch(8, 8, 100)
    found = main_memory(facts, Layout(), batch, workers=8, scorers=2)
    # of 10 M parameters weight, two moments and an average, and a file of the LoRA
    state, sent = 0.16e9, 0.2e9
    assert (found.worker, found.first) == (WORKER + state, WORKER + state + sent)
    assert found.driver == DRIVER + 2 * sent and found.store == found.checkpoint == sent and found.mapped == 22.2e9
    processes = found.driver + found.first + 7 * found.worker + 2 * found.scorer + found.ray
    assert found.total == processes + sent, "weights are on the GPUs"
    blocks = main_memory(facts, Layout(offload="blocks"), batch, 1, 0)
    assert blocks.worker == found.worker + 20e9, "pinned, by each worker"
    here = main_memory(facts, Layout(), batch, 1, 0, on_cpu=True)
    # gradient, state and average, 100 images and the activations of 8
    assert here.worker == pytest.approx(WORKER + state + 0.2e9 + 1e8 + 8e9) and here.first == here.worker
    assert here.total - here.mapped == here.driver + here.first + here.ray + here.store
    large = main_memory(dataclasses.replace(facts, lora=10**8), Layout(), batch, 1, 0)
    assert large.driver == DRIVER + 2e9, "it is not kept in the driver, which only writes checkpoints"


def test_layouts_divide_what_they_should() -> None:
    facts, batch = model(), Batch(8, 8, 100)
    plain = memory(facts, Layout(), batch)
    assert plain.weights == 22.2e9 and plain.lora == 10**7 * 20 and plain.tape == 1e8
    assert plain.peak == plain.weights + plain.lora + plain.tape + 8e9
    # a quarter of the denoiser, two blocks of 1 GB, and eight rows: each rank has a micro-batch of its own
    sharded = memory(facts, Layout(4, "denoiser"), batch)
    assert sharded.weights == 7.2e9 and sharded.peak - sharded.weights - sharded.lora - sharded.tape == 2e9 + 8e9
    # of the encoder a rank has what layers share, 0.2 GB, and a quarter of the rest
    assert memory(facts, Layout(4, "all"), batch).weights == 5.7e9
    assert memory(facts, Layout(4, "all", offload="encoders"), batch).weights == 5.7e9, "what is divided stays"
    assert memory(facts, Layout(4, "denoiser", offload="encoders"), batch).weights == 5e9
    assert memory(facts, Layout(quantize="int8"), batch).weights == pytest.approx(12.2e9, rel=1e-3)
    assert memory(facts, Layout(quantize="int8", quantize_encoders="int8"), batch).weights == pytest.approx(
        11.2e9, rel=1e-3
    )
    assert memory(facts, Layout(quantize="nf4"), batch).weights == pytest.approx(2.2e9 + 10e9 * 9 / 16, rel=1e-3)
    assert memory(facts, Layout(offload="encoders"), batch).weights == 20e9
    assert memory(facts, Layout(offload="blocks"), batch).weights == 1e9
    # nothing of the denoiser but two gathered blocks of 1 GB and this rank's parts of them; the encoder's shared layers
    away = memory(facts, Layout(4, "all", offload="blocks"), batch)
    assert away.weights == 0.2e9 and away.peak - away.weights - away.lora - away.tape == 2.5e9 + 8e9
    # all of the denoiser in every phase, also while the encoder runs
    kept = memory(facts, Layout(4, "all", reshard=False), batch)
    assert kept.weights == 5.7e9 and kept.peak - kept.weights - kept.lora - kept.tape == 20e9 + 8e9
    ways = [Layout(4, "all", reshard=reshard) for reshard in (True, False)]
    assert kept.phases["encode"] > 20e9 and "model.reshard=false" in ways[1].keys()  # noqa: SIM118
    slow = dataclasses.replace(GPUS["h100-80gb"], link=1e9)
    pace = [seconds(facts, way, batch, slow, 1.0) for way in ways]
    assert pace[1] == pytest.approx(0.5 * pace[0], rel=0.1)
    eighth = memory(facts, Layout(4, "all", "int8", "int8"), batch)
    assert eighth.weights == pytest.approx(20e9 / 8 + 0.2e9 + 1e9 / 4, rel=1e-3), "of the encoder one GB is in blocks"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_weights_have_the_size_that_they_are_stored_with(kind: Any) -> None:
    policy = load_policy(ModelConfig(quantize=kind), 0.9, "cpu", 0)
    part = part_of("transformer", policy.pipe.transformer, True)
    stored = sum(stored_bytes(p) for n, p in policy.pipe.transformer.named_parameters() if "lora_" not in n)
    whole = part_of("transformer", load_policy(ModelConfig(), 0.9, "cpu", 0).pipe.transformer, True)
    buffers = sum(map(stored_bytes, policy.pipe.transformer.buffers()))
    assert part.weights.elements == whole.weights.elements
    assert Layout(quantize=kind).size(whole) == stored + buffers < 0.35 * whole.weights.total


def test_the_cheapest_layout_leaves_weights_as_they_are_while_it_can() -> None:
    small, large, batch = GPUS["rtx4090-24gb"], GPUS["h100-80gb"], Batch(8, 8, 100)
    as_it_is = cheapest(model(), batch, 1, large, 1, 0.4)
    assert as_it_is is not None and as_it_is.layout == Layout() and as_it_is.batch == batch
    sharded = cheapest(model(60), batch, 1, large, 8, 0.4)
    assert sharded is not None and sharded.layout.shard != "none" and sharded.layout.quantize == "none"
    offloaded = cheapest(model(), batch, 1, small, 1, 0.4)
    assert offloaded is not None and offloaded.layout.offload == "blocks"
    assert cheapest(model(2000), batch, 1, small, 1, 0.4) is None
    for choice in (as_it_is, sharded, offloaded):
        assert choice.memory.peak <= room(large)


def test_the_largest_micro_batch_just_fits() -> None:
    facts, batch, gpu = model(), Batch(8, 8, 100), GPUS["h100-80gb"]
    rollout, _ = largest(facts, Layout(), batch, gpu)
    assert memory(facts, Layout(), Batch(rollout, 8, 100)).peak <= room(gpu)
    assert memory(facts, Layout(), Batch(rollout + 1, 8, 100)).peak > room(gpu)


def test_pages_and_recipes_say_what_was_recorded() -> None:
    assert sizing.recorded().keys() == set(sizing.recipes())
    for name, makers in sizing.TABLES.items():
        page = (sizing.DOCS / name).read_text(encoding="utf-8")
        assert all(f"{make()}\n" in page for make in makers), "python benchmarks/sizing.py pages writes it"
    for recipe, facts in sizing.recorded().items():
        head = (ROOT / "configs" / "experiment" / f"{recipe}.yaml").read_text(encoding="utf-8").replace("\n# ", " ")
        assert sizing.comment(recipe, facts) in head, "python benchmarks/sizing.py pages writes it"


@more
def test_an_unchanged_recipe_is_answered_from_the_record() -> None:
    """Whatever its prompts, rewards, images per step and layout; not with another size, rank or algorithm."""
    base = ["experiment=sd35_medium_ocr"]
    same = ["rollout.n=2", "model.offload=blocks", "data.train=a.txt", "trainer.steps=3", "cluster.num_workers=2"]
    known = sizing.recorded()["sd35_medium_ocr"]
    for keys in ([], same):
        assert on_record(compose_run([*base, *keys]).config) == ("sd35_medium_ocr", known)
    others = ("sampling.height=1024", "model.lora_rank=4", "algorithm.kl_coef=0.1", "rollout.micro_batch_size=2")
    for key in (*others, "data.train=with_pictures.jsonl"):
        assert on_record(compose_run([*base, key]).config) is None, key


def test_the_page_names_every_gpu() -> None:
    assert not [name for name in GPUS if f"`{name}`" not in (sizing.DOCS / "memory.md").read_text(encoding="utf-8")]


@more
def test_the_keys_for_one_gpu_are_those_of_a_configuration_that_fits() -> None:
    fitting = 0
    for recipe, facts in sizing.recorded().items():
        for name, machine in sizing.ONE.items():
            found, keys = sizing.on(recipe, facts, machine), sizing.one_gpu_keys(recipe, name)
            if found.choice is None or keys is None:
                assert found.choice is keys is None
                continue
            config = compose_run([f"experiment={recipe}", *keys]).config
            layout, batch = configured(config, facts), found.choice.batch
            assert layout == found.choice.layout, recipe
            assert config.rollout.micro_batch_size == batch.rollout >= config.validation.micro_batch_size, recipe
            assert (config.actor.micro_batch_size or batch.rollout) == batch.actor, recipe
            assert memory(facts, layout, batch).peak <= room(GPUS[machine[0]])
            fitting += 1
    assert fitting == 2 * len(sizing.recorded()) - 1, "FLUX.2-dev does not fit on 24 GB, all others fit on both"


@more
def test_the_studio_offers_the_keys_that_were_computed() -> None:
    offered = yaml.safe_load(sizing.CARDS.read_text(encoding="utf-8"))
    assert offered["recipes"] == sizing.card_keys()
    assert not [recipe for recipe, keys in offered["recipes"].items() if keys["8x80gb"] != ""]


def test_recorded_weights_are_those_on_record(weights_on_record: dict[str, int]) -> None:
    """Facts whose architecture has changed since must be found anew: `python benchmarks/sizing.py facts RECIPE`."""
    found, models = weights_on_record, architectures()["models"]
    for recipe, facts in sizing.recorded().items():
        model = "HiDream-ai/HiDream-I1-Full" if facts.model.startswith("./") else facts.model
        parts = {part.name: part.weights.total for part in facts.parts}
        for name, value in models[model]["components"].items():
            if name in parts:
                key = value if isinstance(value, str) else f"{model}/{name}"
                # VAEs that decode in fp32 and layers that stay in it count for more
                assert 2 * found[key] * 0.98 <= parts[name] <= 4 * found[key] * 1.01, (recipe, name)


def test_an_80_gb_gpu_holds_every_recipe_as_it_is() -> None:
    for recipe, facts in sizing.recorded().items():
        found = sizing.on(recipe, facts, ("h100-80gb", 8))
        assert found.fits, (recipe, found.memory)
        assert found.choice is not None and found.choice.seconds <= found.seconds


@more
def test_teachers_take_memory(tmp_path: Path) -> None:
    for name, layers in (("student", 2), ("teacher", 1)):
        tiny.sd3(layers).save_pretrained(tmp_path / name)
    other = str(tmp_path / "teacher")
    call = {"max_sequence_length": 8}
    sampling = SamplingConfig(height=16, width=16, num_inference_steps=2, guidance_scale=1.0, call=call)
    rollout = RolloutConfig(prompts_per_step=1, n=2, micro_batch_size=2)
    algorithm = algorithm_config("opd", teachers=[{"lora": "one", "data_source": "a"}, {"path": other}])
    config = Config(ModelConfig(path=str(tmp_path / "student"), lora_rank=2), sampling, rollout, algorithm)
    facts = find_facts(config, tmp_path, torch.float32, both=False)
    assert facts.averages == 2  # the average, and a LoRA that teaches
    own, its = ([p for p in facts.parts if p.name.endswith(other) == which] for which in (False, True))
    assert [f"{part.name} of {other}" for part in own] == [part.name for part in its]
    assert [part.weights.total > its[i].weights.total for i, part in enumerate(own)].count(True) == 1  # the denoiser
