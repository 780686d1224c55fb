import contextlib
import pickle
from collections.abc import Iterator

import pytest
import tiny
import torch
from diffusers import StableDiffusion3Pipeline

from gerl.errors import ConfigError, ModelError, ReplayError
from gerl.model.errors import PIPELINE_ERRORS, CallRefused, MemoryFull, check_backend, model_errors, raise_refusal
from gerl.workers.rollout import to_uint8


@pytest.fixture(scope="module")
def pipe() -> StableDiffusion3Pipeline:
    return tiny.sd3()


@contextlib.contextmanager
def pipeline_errors(pipe: StableDiffusion3Pipeline, given: dict[str, object]) -> Iterator[None]:
    try:
        yield
    except PIPELINE_ERRORS as error:
        raise_refusal(error, pipe, given)
        raise


def test_a_call_that_the_pipeline_refuses(pipe: StableDiffusion3Pipeline) -> None:
    given = {"sampling.height": 33, "sampling.call.negative_prompt": ["a long text" * 20]}
    with pytest.raises(CallRefused) as caught, pipeline_errors(pipe, given):
        pipe(prompt=["a"], height=33, width=16)
    message = str(caught.value)
    assert message.startswith("StableDiffusion3Pipeline fails with") and "divisible by" in message
    assert "sampling.height=33" in message and "sampling.call.negative_prompt=['a long" in message
    assert len(message) < 500 and "\n" not in message
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # it comes from another process


def test_an_argument_that_is_missing_or_fails_in_torch(pipe: StableDiffusion3Pipeline) -> None:
    wrong = {"prompt_embeds": torch.zeros(1, 8, 3), "pooled_prompt_embeds": torch.zeros(1, 3)}
    with (
        pytest.raises(CallRefused, match=r"RuntimeError.*\.pooled=1"),
        pipeline_errors(pipe, {"sampling.call.pooled": 1}),
    ):
        pipe(**wrong, height=16, width=16, guidance_scale=1.0, num_inference_steps=1)
    with pytest.raises(CallRefused, match="unexpected keyword"), pipeline_errors(pipe, {}):
        pipe(nonsense=1)


def test_bugs_of_gerl_and_its_own_sentences_stay_as_they_are(pipe: StableDiffusion3Pipeline) -> None:
    with pytest.raises(AttributeError, match="NoneType"), pipeline_errors(pipe, {}):
        to_uint8(None)  # type: ignore[arg-type]
    with pytest.raises(ReplayError), pipeline_errors(pipe, {}):
        raise ReplayError("a")
    with pytest.raises(KeyboardInterrupt), pipeline_errors(pipe, {}):
        raise KeyboardInterrupt


@pytest.mark.parametrize("phase, keys", [
    ("loading", ["model.offload=encoders"]), ("rollout", ["rollout.micro_batch_size", "16 images"]),
    ("validation", ["validation.micro_batch_size"]),
    ("update", ["actor.micro_batch_size", "model.gradient_checkpointing=true"]),
])  # fmt: skip
def test_full_memory_names_the_keys_that_lower_it(phase: str, keys: list[str]) -> None:
    for raised in (lambda: torch.empty(2**60), lambda: bytearray(2**62)):  # torch's own error, and Python's
        with pytest.raises(MemoryFull) as caught, model_errors(phase, 16):  # type: ignore[arg-type]
            raised()
        assert all(key in str(caught.value) for key in keys) and "main memory" in str(caught.value)
    full = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 0 is free. "
    )
    with pytest.raises(MemoryFull, match=r"the GPU's memory .*Tried to allocate 2\.00 GiB"), model_errors("update"):
        raise torch.OutOfMemoryError(full + "Including non-PyTorch memory, this process has 79 GiB memory in use.")


def test_full_memory_inside_a_call_is_not_the_arguments_fault(pipe: StableDiffusion3Pipeline) -> None:
    with pytest.raises(MemoryFull), model_errors("rollout", 1), pipeline_errors(pipe, {}):
        pipe(prompt=["a"], height=2**28, width=2**28, num_inference_steps=1)


def test_what_the_compiler_raises_names_the_key() -> None:
    def backend(*_: object) -> None:
        raise OSError("no C++ compiler")

    compiled = torch.compile(lambda x: x * 2, backend=backend)
    says = r"model\.compile: .*no C\+\+ compiler.*inductor.*model\.compile=null"
    with pytest.raises(ModelError, match=says), model_errors("rollout", 1):
        compiled(torch.ones(2))


def test_a_backend_that_torch_does_not_have() -> None:
    check_backend(None)
    check_backend("inductor")
    check_backend("aot_eager")
    with pytest.raises(ConfigError, match=r"model\.compile='inductr': .*inductor.* null"):
        check_backend("inductr")
