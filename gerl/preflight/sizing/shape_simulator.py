"""A pipeline whose components are shapes without values, that samples and trains, and a ledger of its operations."""

import copy
import functools
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import BatchEncoding, Cache
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

# --- A pipeline whose components are shapes without values, that samples and trains all the same.
#
# The pipeline, gerl's engine and its algorithms run as they are, on real latents and embeddings, which are small. Where
# a component of the pipeline is called, it runs under `FakeTensorMode`, which tells what it would allocate and compute;
# what it hands on is noise of the right shape. A call with gradient hands on a node of autograd, whose backward is that
# of the component. A call that was made before, with the same shapes and as many graphs alive, is not made again.

# what pipelines call on a component besides `forward`; a part of it that they call is found by its own `forward`
LARGE = 2**22  # elements from which on a tensor is of zeros, which take no memory until they are written
METHODS = ("decode", "encode", "get_image_features", "get_text_features", "generate")


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor that a call returns; a tensor would count as alive."""

    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Argument:
    """An argument that a call returns: the leaf at this position."""

    position: int


@dataclass
class Cost:
    """Floating-point operations of a call, forward and backward."""

    forward: int = 0
    backward: int = 0
    output: Any = None  # shapes


@dataclass
class Tally:
    """A phase: operations by component, and the most bytes that were alive while it ran, without weights."""

    flops: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # backward passes as well
    peaks: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Operations of all components."""
        return sum(self.flops.values())

    def called(self, name: str, flops: int) -> None:
        """Another call of the component `name`, forward or backward."""
        self.flops[name] = self.flops.get(name, 0) + flops
        self.calls[name] = self.calls.get(name, 0) + 1

    def restart(self) -> None:
        """Count operations from 0; peaks stay."""
        self.flops.clear()
        self.calls.clear()


class Handle:
    """A graph that waits for its backward; `outputs` is empty where the call was made before."""

    def __init__(self, stage: "Stage", name: str, cost: Cost, outputs: list[torch.Tensor]) -> None:
        self.stage, self.name, self.cost, self.outputs = stage, name, cost, outputs
        self.open = True
        stage.graphs += 1

    def close(self) -> None:
        if self.open:
            self.open, self.outputs = False, []
            self.stage.graphs -= 1

    def __del__(self) -> None:
        self.close()


class _Node(torch.autograd.Function):
    """The component's graph as one node of the pipeline's; `anchor` lets the outputs need a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, handle: Handle, *values: torch.Tensor) -> Any:
        ctx.handle = handle
        ctx.mark_non_differentiable(*(v for v in values if not v.is_floating_point()))
        return tuple(v.clone() for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.handle.stage.backward(ctx.handle, grads)
        return (None,) * (2 + len(grads))


class Stage:
    """Runs components as shapes. `phase`: the name of the current one; `tallies`: the work of each."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.ledger = Ledger()
        self.tallies: dict[str, Tally] = {}
        self.phase = ""
        self.graphs = 0  # alive
        self._inside = False
        self._costs: dict[object, Cost] = {}
        self._blocks: dict[object, tuple[int, Any]] = {}
        self._originals: list[torch.nn.Parameter] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._generator = torch.Generator()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device meta as one of the CPU without values."""
        return FakeTensor(self.mode, tensor, torch.device("cpu"))

    def put_on(self, pipe: DiffusionPipeline) -> None:
        """Route the calls of all components of `pipe`, whose weights become shapes of the CPU."""
        for name, component in pipe.components.items():
            if not isinstance(component, torch.nn.Module):
                continue
            shared: dict[int, torch.nn.Parameter] = {}  # weights that are tied stay so
            for module in component.modules():
                self._give_shapes(module, shared)
                module.__dict__["_apply"] = lambda *_, own=module, **__: own  # shapes are not cast in place
            self.ledger.leave_out([*component.parameters(), *component.buffers()])
            lora = [m for m in component.modules() if isinstance(m, BaseTunerLayer)]
            trains = any(p.requires_grad for p in component.parameters())
            if not hasattr(component, "decode"):  # the blocks of a video's decoder write into lists that they are given
                for module in component.modules():
                    if isinstance(module, torch.nn.ModuleList):
                        for block in module:
                            self._answer_repeats(block)
            for module in component.modules():
                methods = ("forward", *METHODS) if module is component else ("forward",)
                for method in methods:
                    if callable(original := getattr(module, method, None)):
                        routed = functools.partial(self._call, name, module, trains, lora, original)
                        module.__dict__[method] = functools.update_wrapper(routed, original)

    def _give_shapes(self, module: torch.nn.Module, shared: dict[int, torch.nn.Parameter]) -> None:
        for name, p in module._parameters.items():
            if p is not None and p.is_meta and not isinstance(p, FakeTensor):
                if id(p) not in shared:
                    shared[id(p)] = torch.nn.Parameter(self.fake(p.data), requires_grad=p.requires_grad)
                    self._originals.append(p)  # so that no other one gets its id
                module._parameters[name] = shared[id(p)]
        for values in (module._buffers, module.__dict__):
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, FakeTensor):
                    values[name] = self.fake(value)

    def _answer_repeats(self, block: torch.nn.Module) -> None:
        """Reuse the output of a block of the same structure for the same shapes, in calls without gradient."""
        original = block.forward
        structure = (type(block), tuple((n, tuple(p.shape), p.dtype) for n, p in block.named_parameters()))

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            if torch.is_grad_enabled() or any(isinstance(v, Cache) for v in leaves):
                return original(*args, **kwargs)
            adapted = [m.disable_adapters for m in block.modules() if isinstance(m, BaseTunerLayer)][:1]
            key = (structure, str(adapted), _switches(block), _signature((args, kwargs)))
            if key not in self._blocks:
                before = self.ledger.flops
                output = original(*args, **kwargs)
                given = {id(v.untyped_storage()): i for i, v in enumerate(leaves) if torch.is_tensor(v)}

                def describe(value: Any) -> Any:
                    position = given.get(id(value.untyped_storage())) if torch.is_tensor(value) else None
                    same = position is not None and leaves[position].shape == value.shape
                    return Argument(position) if position is not None and same else _describe(value)

                like = tree_map(describe, output)
                self._blocks[key] = (self.ledger.flops - before, like)
                return output
            flops, like = self._blocks[key]
            self.ledger.flops += flops

            def answer(value: Any) -> Any:
                if isinstance(value, Shape):
                    return torch.empty(value.size, dtype=value.dtype)
                return leaves[value.position] if isinstance(value, Argument) else value

            return tree_map(answer, like)

        block.__dict__["forward"] = functools.update_wrapper(forward, original)

    @contextmanager
    def _within(self, name: str, grad: bool) -> Iterator[Tally]:
        """Operations are of shapes and counted as those of the component `name`."""
        tally = self.tallies.setdefault(self.phase, Tally())
        self._inside = True
        self.ledger.reset()
        try:
            with torch.set_grad_enabled(grad), self.mode, self.ledger:
                yield tally
        finally:
            self._inside = False
            tally.peaks[name] = max(tally.peaks.get(name, 0), self.ledger.peak)

    def _call(
        self,
        name: str,
        module: torch.nn.Module,
        trains: bool,
        lora: list[BaseTunerLayer],
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._inside:
            return function(*args, **kwargs)
        grad = torch.is_grad_enabled() and trains
        adapted = bool(lora) and not lora[0].disable_adapters
        # two calls of a model give the same numbers
        self._generator.manual_seed(zlib.crc32(repr((name, adapted, _sums((args, kwargs)))).encode()))
        signature, graphs = _signature((args, kwargs)), self.graphs if grad else 0
        key = (self.phase, id(function), name, grad, adapted, graphs, _switches(module), signature)
        cost = self._costs.get(key)
        outputs: list[torch.Tensor] = []
        if cost is None:
            cost = self._costs[key] = Cost()
            with self._within(name, grad):
                fakes = tree_map(self._input, (args, kwargs))
                self.ledger.count(fakes)
                output = function(*fakes[0], **fakes[1])
                cost.forward, cost.output = self.ledger.flops, tree_map(_describe, output)
                outputs = [v for v in tree_leaves(output) if isinstance(v, torch.Tensor)] if grad else []
                del fakes, output
        self.tallies[self.phase].called(name, cost.forward)
        leaves, structure = tree_flatten(cost.output)
        values = [self._values(v) if isinstance(v, Shape) else self._real(v) for v in leaves]
        if grad:
            places = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
            handle = Handle(self, name, cost, outputs)
            nodes = _Node.apply(self._anchor, handle, *(values[i] for i in places))
            for i, node in zip(places, nodes, strict=True):
                values[i] = node
        return tree_unflatten(values, structure)

    def backward(self, handle: Handle, grads: tuple[torch.Tensor | None, ...]) -> None:
        """The backward pass of a component's call; it is made where its forward was."""
        if handle.outputs:
            with self._within(handle.name, True):
                pairs = [
                    (output, self._input(grad))
                    for output, grad in zip(handle.outputs, grads, strict=True)
                    if output.requires_grad and grad is not None
                ]
                self.ledger.count([grad for _, grad in pairs])
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
                handle.cost.backward = self.ledger.flops
        self.tallies[self.phase].called(handle.name, handle.cost.backward)
        handle.close()

    def _input(self, value: Any) -> Any:
        """Numbers become shapes; integers and masks stay, since models read them."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or not value.is_floating_point():
            return value
        return self.fake(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))

    def _values(self, shape: Shape) -> torch.Tensor:
        """Noise, or zeros of integers."""
        if not shape.dtype.is_floating_point or math.prod(shape.size) > LARGE:
            return torch.zeros(shape.size, dtype=shape.dtype)
        return torch.randn(shape.size, generator=self._generator).to(shape.dtype)

    def _real(self, value: Any) -> Any:
        if isinstance(value, DiagonalGaussianDistribution):
            found = copy.copy(value)
            found.__dict__ = {k: self._values(v) if isinstance(v, Shape) else v for k, v in vars(value).items()}
            return found
        return value


def _describe(value: Any) -> Any:
    """A call's output, without anything alive."""
    if isinstance(value, Cache):
        return None
    if isinstance(value, DiagonalGaussianDistribution):
        found = copy.copy(value)
        found.__dict__ = {k: _describe(v) for k, v in vars(value).items()}
        return found
    return Shape(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _switches(module: torch.nn.Module) -> tuple[bool, ...]:
    """The mode of each submodule: mixtures of experts compute differently in training mode."""
    return tuple(part.training for part in module.modules())


def _sums(tree: Any) -> list[float]:
    """A number for each tensor, to tell inputs apart."""
    return [float(v.sum()) for v in tree_leaves(tree) if isinstance(v, torch.Tensor)]


def _signature(tree: Any) -> object:
    """Everything in a call that decides its cost: shapes, the values of integers, and other arguments."""

    def describe(value: Any) -> object:
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, int | float | str | bool | None) else type(value).__name__
        few = not value.is_floating_point() and not isinstance(value, FakeTensor) and value.numel() <= 2**16
        return (tuple(value.shape), value.dtype, tuple(value.flatten().tolist()) if few and value.ndim > 1 else None)

    leaves, structure = tree_flatten(tree)
    return (str(structure), tuple(map(describe, leaves)))


# --- Bytes and arithmetic of operations, as torch dispatches them: on weights that exist as shapes, or on real ones

aten = torch.ops.aten
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


# torch's counter leaves the CPU's attention out; to be given to its FlopCounterMode as `custom_mapping`
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _shape(value: object) -> object:
    return value.shape if isinstance(value, torch.Tensor) else value


def _spread(indices: torch.Tensor, shape: torch.Size, dim: int = -1, **_: Any) -> torch.Tensor:
    """Positions along `dim` of a tensor of `shape`, in the shape of `indices`, all of them equally often."""
    with _disable_current_modes():
        moved = torch.empty(indices.shape, device="meta").movedim(dim, -1).shape
        return (torch.arange(math.prod(moved)) % shape[dim]).view(moved).movedim(-1, dim)


class Ledger(TorchDispatchMode):
    """Follows the storages that operations make while it is entered, and counts floating-point operations.

    A storage counts from the operation that makes it until the last tensor on it is gone, wherever that is held, by
    autograd as well. `live`: bytes of those that are there; `peak`: the most of them at a time since `reset`; `flops`:
    operations since, a multiplication and an addition as two, by the formulas of torch's `FlopCounterMode`.

    Entered inside a `FakeTensorMode`, what depends on no shape without values (masks, positions) is computed, so that
    models can read it. The positions that `topk` finds are spread evenly, as routers of experts are trained to spread
    them: how many there are, and with them the number of operations, does not depend on values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by id, which is not reused while it is here

    def reset(self) -> None:
        """Begin a new peak, and count operations from 0; live storages stay counted."""
        self.peak, self.flops = self.live, 0

    def leave_out(self, tensors: object) -> None:
        """The storages of `tensors`, such as weights, are not counted."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor, counted=False)

    def count(self, tensors: object) -> None:
        """The storages of `tensors` count from now on, as long as they live."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor, counted=True)
        self.peak = max(self.peak, self.live)

    def _follow(self, tensor: torch.Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0

        def freed(_: object) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs, packet = kwargs or {}, func._overloadpacket
        if self._has_values(func, args, kwargs):
            with _disable_current_modes():
                result = func(*args, **kwargs)
        else:
            if packet in INDEXING:
                args = (args[0], self._as_positions(args[1]), *args[2:])
            result = func(*args, **kwargs)
            if packet is aten.topk:
                result = (result[0], _spread(result[1], args[0].shape, *args[2:3], **kwargs))
        self.count(result)
        if packet in CPU_ATTENTION:
            self.flops += CPU_ATTENTION[packet](*map(_shape, args), **{k: _shape(v) for k, v in kwargs.items()})
        elif packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=result))
        return result

    def _as_positions(self, indices: Any) -> list[Any]:
        """`indices` of a shape, with masks that have values as the positions at which they are true."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
                with _disable_current_modes():
                    found += index.nonzero(as_tuple=True)
            else:
                found.append(index)
        self.count(found)
        return found

    @staticmethod
    def _has_values(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation is on real tensors alone, or makes integers of nothing."""
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if tensors:
            return not any(isinstance(v, FakeTensor) or v.is_meta for v in tensors)
        dtype = kwargs.get("dtype")
        if dtype is None:
            return func._overloadpacket is aten.arange and all(isinstance(v, int) for v in args)
        return not dtype.is_floating_point and not dtype.is_complex and kwargs.get("device") != torch.device("meta")


# --- Stand-ins for missing tokenizers: a text becomes as many tokens as texts of its length usually do

CHARACTERS = 4  # of English text in a token
PLACE = "<|image_pad|>"  # where a text has a picture


@dataclass(frozen=True)
class Picture:
    """How Qwen's processors turn a picture into patches, of which `merge_size` x `merge_size` become a token."""

    token: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def grid(self, picture: Image.Image) -> tuple[int, int]:
        """Rows and columns of patches."""
        factor = self.patch_size * self.merge_size
        height, width = smart_resize(picture.height, picture.width, factor, self.min_pixels, self.max_pixels)
        return height // self.patch_size, width // self.patch_size

    def patches(self, grids: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """The model's arguments for pictures: grey patches `[N, 3 * temporal * patch * patch]`, and their grids."""
        count, size = sum(h * w for h, w in grids), 3 * self.temporal_patch_size * self.patch_size**2
        return {"pixel_values": torch.zeros(count, size), "image_grid_thw": torch.tensor([(1, h, w) for h, w in grids])}


class Tokens:
    """Answers the calls of a tokenizer or a processor with meaningless token ids.

    `model_max_length`: to which length a padded text without `max_length` comes. `end`: the id of the last token.
    `picture`: of a processor that takes pictures.
    """

    def __init__(self, model_max_length: int = 512, end: int = 2, picture: Picture | None = None) -> None:
        self.picture = picture
        self.model_max_length = model_max_length
        self.tokenizer_max_length = model_max_length
        self.padding_side = "right"
        self.pad_token, self.eos_token, self.bos_token, self.unk_token = "<pad>", "<end>", "<begin>", "<unknown>"
        self.pad_token_id, self.eos_token_id, self.bos_token_id, self.unk_token_id = 0, end, 1, 0
        self.tokenizer = self  # of a processor
        self.added_tokens_encoder: dict[str, int] = {}

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """The token ids of a text."""
        return [3] * (len(text) // CHARACTERS) + [self.eos_token_id]

    def __call__(
        self,
        text: Any = None,
        images: Any = None,
        *_: Any,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        **__: Any,
    ) -> BatchEncoding:
        texts = [text] if isinstance(text, str) else list(text)
        pictures: dict[str, torch.Tensor] = {}
        if images is not None and self.picture is not None:
            grids = [self.picture.grid(p) for p in (images if isinstance(images, list | tuple) else [images])]
            pictures = self.picture.patches(grids)
            rows = [self._with_pictures(t, grids[min(i, len(grids) - 1)]) for i, t in enumerate(texts)]
        else:
            rows = [self.encode(t) for t in texts]
        most = max_length or self.model_max_length
        if truncation:
            rows = [row[: most - 1] + row[-1:] if len(row) > most else row for row in rows]
        width = most if padding == "max_length" else max(map(len, rows))
        ids = torch.tensor([row + [self.pad_token_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask, **pictures})

    def _with_pictures(self, text: str, grid: tuple[int, int]) -> list[int]:
        """The token ids of a text, with those of a picture in its place."""
        assert self.picture is not None
        before, *after = text.split(PLACE)
        tokens = [self.picture.token] * (grid[0] * grid[1] // self.picture.merge_size**2)
        return self.encode(before)[:-1] + tokens * len(after) + self.encode("".join(after))

    def apply_chat_template(self, messages: Any, *_: Any, tokenize: bool = True, **options: Any) -> Any:
        """The text of a conversation or of several, or its tokens."""
        several = bool(messages) and isinstance(messages[0], list)
        texts = [_text(conversation) for conversation in (messages if several else [messages])]
        if tokenize:
            return self(texts, **options)
        return texts if several else texts[0]

    def batch_decode(self, ids: Sequence[Any], *_: Any, **__: Any) -> list[str]:
        """A text for each row of ids."""
        return ["" for _ in ids]

    def tokenize(self, text: str, *_: Any, **__: Any) -> list[str]:
        """A text's tokens as texts."""
        return [self.unk_token] * len(self.encode(text))


def _text(value: Any) -> str:
    """The words in a conversation."""
    if isinstance(value, dict):
        return " ".join(_text(v) for k, v in value.items() if k != "type")
    return " ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
