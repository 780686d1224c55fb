import pytest
from profiling import OTHERS, OUTSIDE, REST, part_of, seconds_by_part, table

LIBRARIES = "/a b/lib/python3.11/site-packages"
RUN = 'process 1:"python -m gerl.trainer.main_flowgrpo";main (/x/gerl/trainer/main_flowgrpo.py:9)'
WORKER = f'{RUN};process 22:"ray::PolicyWorker";Worker.main_loop ({LIBRARIES}/ray/_private/worker.py:1)'
DRAWS = f"{WORKER};PolicyWorker.sample (/x/gerl/workers/worker.py:168)"
VALIDATES = f"{WORKER};PolicyWorker.validate (/x/gerl/workers/worker.py:203)"
SD3 = f"{LIBRARIES}/diffusers/models/transformers/transformer_sd3.py"


@pytest.mark.parametrize(
    ("stack", "part", "validates"),
    [
        (f"{DRAWS};SD3Transformer2DModel.forward ({SD3}:300);Linear.forward ({LIBRARIES}/torch/nn/x.py:1)", 0, False),
        (f"{VALIDATES};SD3Transformer2DModel.forward ({SD3}:300)", 0, True),
        (f"{DRAWS};_engine_run_backward ({LIBRARIES}/torch/autograd/graph.py:8);forward ({SD3}:3)", 1, False),
        (f"{DRAWS};AutoencoderKL.decode ({LIBRARIES}/diffusers/models/autoencoders/autoencoder_kl.py:3)", 2, False),
        (f"{DRAWS};X.encode_prompt ({LIBRARIES}/diffusers/pipelines/x.py:3);f ({LIBRARIES}/torch/x.py:1)", 3, False),
        (
            f"{WORKER};PolicyWorker.step (/x/gerl/workers/worker.py:9);A.step ({LIBRARIES}/torch/optim/a.py:1)",
            4,
            False,
        ),
        (f"{RUN};process 3:x;RewardWorker.score (/x/gerl/rewards/worker.py:60);f (/x/y.py:1)", 5, False),
        (f"{DRAWS};record (/x/gerl/engine/record.py:79)", 6, False),
        (f"{WORKER};PolicyWorker.checkpoint (/x/gerl/workers/worker.py:9);f (/x/y.py:1)", 6, False),
        (f"{WORKER};PolicyWorker.call (/x/gerl/workers/worker.py:9);release (/x/gerl/workers/fleet.py:9)", 6, False),
        (f"{WORKER};PolicyWorker.call (/x/gerl/workers/worker.py:9);check (/x/gerl/workers/fleet.py:9)", 7, False),
        (f"{RUN};Run.train (/x/gerl/trainer/run.py:9);train (/x/gerl/trainer/run.py:9)", 7, False),
        (f"{RUN};train (/x/gerl/trainer/run.py:9);take (/x/gerl/trainer/run.py:9);f (/x/y.py:1)", 6, False),
        (f"{RUN};conclude (/x/gerl/trainer/run.py:9);validate (/x/gerl/trainer/validation.py:9)", 6, True),
        (f"{WORKER};PolicyWorker.setup (/x/gerl/workers/worker.py:110);forward ({SD3}:300)", 7, False),
    ],
)
def test_a_stack_belongs_to_a_part(stack: str, part: int, validates: bool) -> None:
    parts = ["denoiser, forward", "denoiser, backward", "VAE", "text encoders", "optimizer", "scoring", REST, OUTSIDE]
    assert part_of(stack) == (parts[part], validates)


def test_the_samples_of_a_process_share_its_cpu_time() -> None:
    forward, optimizer = f"{DRAWS};forward ({SD3}:300)", f"{DRAWS};step ({LIBRARIES}/torch/optim/adamw.py:1)"
    lines = [f"{forward} 3", f"{optimizer} 1", f"{VALIDATES};forward ({SD3}:300) 4", f"{WORKER} 2", f"{RUN} 7"]
    found = seconds_by_part(lines, {1: 5.0, 22: 20.0, 9: 1.0})
    assert found == {
        ("denoiser, forward", False): 6.0,
        ("optimizer", False): 2.0,
        ("denoiser, forward", True): 8.0,
        (OUTSIDE, False): 4.0,
        (OTHERS, False): 6.0,  # of process 9 there is no sample, and process 1 has no work of the run among its own
    }
    assert table(found)[2:] == [
        "| denoiser, forward | 14.0 | 8.0 | 87.5 % |",
        f"| {OTHERS} | 6.0 | 0.0 |  |",
        f"| {OUTSIDE} | 4.0 | 0.0 |  |",
        "| optimizer | 2.0 | 0.0 | 12.5 % |",
    ]
