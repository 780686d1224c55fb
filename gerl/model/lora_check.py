"""Whether plain diffusers reads the whole of a LoRA file: on a skeleton of the model, before it counts as written."""

from collections.abc import Mapping

import accelerate
import torch
from diffusers import ModelMixin
from diffusers.loaders import PeftAdapterMixin
from peft import get_peft_model_state_dict
from safetensors.torch import load

from gerl.errors import ModelError

ADAPTER = "check"
_SOUND: set[tuple[object, ...]] = set()  # classes with the tensors that they took, in this process


def check_loads(content: bytes, denoisers: Mapping[str, torch.nn.Module]) -> None:
    """Raise `ModelError` unless a plain model of each class takes all tensors of a file in diffusers' format.

    Only classes and configurations of `denoisers`, by the name that begins their tensors, are read. Diffusers itself
    only warns of tensors that it has no layer for. Classes that load no LoRA are left out.
    """
    tensors = load(content)
    for name, denoiser in denoisers.items():
        if not (isinstance(denoiser, PeftAdapterMixin) and isinstance(denoiser, ModelMixin)):
            continue
        own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        known = (type(denoiser), str(denoiser.config), *((key, value.shape) for key, value in sorted(own.items())))
        if known in _SOUND:
            continue
        with accelerate.init_empty_weights():
            plain = type(denoiser).from_config(denoiser.config)
        try:
            plain.load_lora_adapter(own, prefix=None, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"plain diffusers does not load the LoRA of {name}: {reason}") from error
        loaded = get_peft_model_state_dict(plain, adapter_name=ADAPTER)
        wrong = sorted(own.keys() ^ loaded.keys()) or [k for k, v in own.items() if loaded[k].shape != v.shape]
        if wrong:
            raise ModelError(
                f"a plain {type(denoiser).__name__} does not accept {len(wrong)} tensors of the LoRA of {name}, "
                f"such as {wrong[0]}: train the pipeline without additional or fused layers"
            )
        _SOUND.add(known)
