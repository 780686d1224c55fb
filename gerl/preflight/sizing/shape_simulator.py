"""Simulate sampling and training of a pipeline on shapes without values, and count memory and operations."""

import functools
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry
from transformers import BatchEncoding, Cache

# --- Sampling and training of a pipeline whose components have shapes but no values.
#
# The pipeline, gerl's engine and its algorithms run unchanged on real latents and embeddings, which are small. Each
# component call runs under `FakeTensorMode`, which records allocations and operations, and returns noise of the right
# shape. A call with gradient returns an autograd node whose backward runs the component's backward. A repeated call,
# with the same shapes and number of live graphs, is not traced again.

# methods that pipelines call on a component besides `forward`; a submodule is routed only by its `forward`
LARGE = 2**22  # larger tensors are zeros, which take no memory until they are written
METHODS = ("decode", "encode", "get_image_features", "get_text_features", "generate")


@dataclass(frozen=True)
class Shape:
    """Shape of a returned tensor; keeping the tensor would count as live memory."""

    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Argument:
    """Marker for a call that returns one of its arguments: the leaf at `position`."""

    position: int


@dataclass
class Cost:
    """Floating-point operations and output of a call."""

    forward: int = 0
    backward: int = 0
    output: Any = None  # shapes


@dataclass
class Tally:
    """Work of a phase: operations, calls and peak live bytes (without weights) by component."""

    flops: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # including backward passes
    peaks: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of operations of all components."""
        return sum(self.flops.values())

    def called(self, name: str, flops: int) -> None:
        """Add a forward or backward call of the component `name`."""
        self.flops[name] = self.flops.get(name, 0) + flops
        self.calls[name] = self.calls.get(name, 0) + 1

    def restart(self) -> None:
        """Reset operations and calls; keep peaks."""
        self.flops.clear()
        self.calls.clear()


class Handle:
    """A graph that awaits its backward pass; `outputs` is empty for a repeated call."""

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
    """A component's graph as one autograd node; `anchor` makes the outputs require a gradient."""

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
    """Runner of components on shapes. `phase`: name of the current phase; `tallies`: work by phase."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.ledger = Ledger()
        self.tallies: dict[str, Tally] = {}
        self.phase = ""
        self.graphs = 0  # number of live graphs
        self._inside = False
        self._costs: dict[object, Cost] = {}
        self._blocks: dict[object, tuple[int, Any]] = {}
        self._originals: list[torch.nn.Parameter] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._generator = torch.Generator()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor as a fake CPU tensor without values."""
        return FakeTensor(self.mode, tensor, torch.device("cpu"))

    def put_on(self, pipe: DiffusionPipeline) -> None:
        """Intercept the calls of all components of `pipe`, and turn their weights into fake CPU tensors."""
        for name, component in pipe.components.items():
            if not isinstance(component, torch.nn.Module):
                continue
            shared: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
            for module in component.modules():
                self._give_shapes(module, shared)
                module.__dict__["_apply"] = lambda *_, own=module, **__: own  # fake tensors cannot be cast in place
            self.ledger.leave_out([*component.parameters(), *component.buffers()])
            lora = [m for m in component.modules() if isinstance(m, BaseTunerLayer)]
            trains = any(p.requires_grad for p in component.parameters())
            if not hasattr(component, "decode"):  # blocks of a video decoder write into lists passed as arguments
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
                    self._originals.append(p)  # keeps its id from being reused
                module._parameters[name] = shared[id(p)]
        for values in (module._buffers, module.__dict__):
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, FakeTensor):
                    values[name] = self.fake(value)

    def _answer_repeats(self, block: torch.nn.Module) -> None:
        """Reuse the output of a block with the same structure and input shapes, in calls without gradient."""
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
                place_of = {id(v.untyped_storage()): i for i, v in enumerate(leaves) if torch.is_tensor(v)}

                def describe(value: Any) -> Any:
                    position = place_of.get(id(value.untyped_storage())) if torch.is_tensor(value) else None
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
        # equal calls of a model return equal values
        sums = [float(v.sum()) for v in _tensors((args, kwargs))]
        self._generator.manual_seed(zlib.crc32(repr((name, adapted, sums)).encode()))
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
                outputs = _tensors(output) if grad else []
                del fakes, output
        self.tallies[self.phase].called(name, cost.forward)
        leaves, structure = tree_flatten(cost.output)
        values = [self._values(v) if isinstance(v, Shape) else v for v in leaves]
        if grad:
            places = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
            handle = Handle(self, name, cost, outputs)
            nodes = _Node.apply(self._anchor, handle, *(values[i] for i in places))
            for i, node in zip(places, nodes, strict=True):
                values[i] = node
        return tree_unflatten(values, structure)

    def backward(self, handle: Handle, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Run the backward pass of a traced call, or count the known cost of a repeated one."""
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
        """Return floating-point tensors as fake tensors; integers and masks stay real, since models read them."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or not value.is_floating_point():
            return value
        return self.fake(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))

    def _values(self, shape: Shape) -> torch.Tensor:
        if not shape.dtype.is_floating_point or math.prod(shape.size) > LARGE:
            return torch.zeros(shape.size, dtype=shape.dtype)
        return torch.randn(shape.size, generator=self._generator).to(shape.dtype)


def _distribution(values: Iterable[Any], names: Any) -> DiagonalGaussianDistribution:
    distribution = object.__new__(DiagonalGaussianDistribution)
    vars(distribution).update(zip(names, values, strict=True))
    return distribution


# so that `tree_map` reaches the tensors of what a VAE returns
register_pytree_node(DiagonalGaussianDistribution, lambda d: (list(vars(d).values()), tuple(vars(d))), _distribution)


def _describe(value: Any) -> Any:
    """Return a call's output with tensors replaced by shapes, so that it holds no memory."""
    if isinstance(value, Cache):
        return None
    return Shape(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _switches(module: torch.nn.Module) -> tuple[bool, ...]:
    """Return the training mode of each submodule, since mixtures of experts compute differently in training."""
    return tuple(part.training for part in module.modules())


def _tensors(tree: object) -> list[torch.Tensor]:
    return [v for v in tree_leaves(tree) if isinstance(v, torch.Tensor)]


def _signature(tree: Any) -> object:
    """Return all that determines the cost of a call: shapes, integer values, and other arguments."""

    def describe(value: Any) -> object:
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, int | float | str | bool | None) else type(value).__name__
        few = not value.is_floating_point() and not isinstance(value, FakeTensor) and value.numel() <= 2**16
        return (tuple(value.shape), value.dtype, tuple(value.flatten().tolist()) if few and value.ndim > 1 else None)

    leaves, structure = tree_flatten(tree)
    return (str(structure), tuple(map(describe, leaves)))


# --- Bytes and FLOPs of operations as torch dispatches them, on fake or real tensors

aten = torch.ops.aten
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


# attention on the CPU, which torch's `FlopCounterMode` omits
for cpu, gpu in (
    (aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward, aten._scaled_dot_product_flash_attention_backward),
):
    flop_registry.setdefault(cpu, flop_registry[gpu])


def _spread(indices: torch.Tensor, shape: torch.Size, dim: int = -1, **_: Any) -> torch.Tensor:
    """Return evenly spread positions along `dim` of a tensor of `shape`, in the shape of `indices`."""
    with _disable_current_modes():
        moved = torch.empty(indices.shape, device="meta").movedim(dim, -1).shape
        return (torch.arange(math.prod(moved)) % shape[dim]).view(moved).movedim(-1, dim)


class Ledger(TorchDispatchMode):
    """Dispatch mode that tracks the storages allocated by operations and counts floating-point operations.

    A storage counts from the operation that allocates it until its last tensor is freed, including tensors saved by
    autograd. `live`: bytes of live storages; `peak`: their maximum since `reset`; `flops`: operations since `reset` by
    the formulas of torch's `FlopCounterMode`, where a multiply-add counts as two.

    Inside a `FakeTensorMode`, operations that involve no fake tensor (masks, positions) are computed, so that models
    can read their values. `topk` returns evenly spread positions, as trained expert routers do, so that the number of
    operations does not depend on values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by id, removed once the storage is freed

    def reset(self) -> None:
        """Reset the peak and the operations; live storages stay counted."""
        self.peak, self.flops = self.live, 0

    def leave_out(self, tensors: object) -> None:
        """Exclude the storages of `tensors`, such as weights."""
        for tensor in _tensors(tensors):
            self._follow(tensor.untyped_storage(), 0)

    def count(self, tensors: object) -> None:
        """Count the storages of `tensors` from now on, until they are freed."""
        for tensor in _tensors(tensors):
            self._follow(storage := tensor.untyped_storage(), storage.nbytes())
        self.peak = max(self.peak, self.live)

    def _follow(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key in self._known:
            return

        def freed(_: object) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=result))
        return result

    def _as_positions(self, indices: Any) -> list[Any]:
        positions: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
                with _disable_current_modes():
                    positions += index.nonzero(as_tuple=True)
            else:
                positions.append(index)
        self.count(positions)
        return positions

    @staticmethod
    def _has_values(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation uses only real tensors, or creates integers without input tensors."""
        if tensors := _tensors((args, kwargs)):
            return not any(isinstance(v, FakeTensor) or v.is_meta for v in tensors)
        dtype = kwargs.get("dtype")
        if dtype is None:
            return func._overloadpacket is aten.arange and all(isinstance(v, int) for v in args)
        return not dtype.is_floating_point and not dtype.is_complex and kwargs.get("device") != torch.device("meta")


# --- Substitutes for missing tokenizers, with a typical number of tokens for the length of a text

CHARACTERS = 4  # of English text per token
PLACE = "<|image_pad|>"  # placeholder of an image in a text


@dataclass(frozen=True)
class Picture:
    """Image preprocessing of Qwen's processors: patches, of which `merge_size` x `merge_size` form a token."""

    token: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def grid(self, picture: Image.Image) -> tuple[int, int]:
        """Return the rows and columns of patches."""
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        except ImportError:  # before transformers 5.4
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        factor = self.patch_size * self.merge_size
        height, width = smart_resize(picture.height, picture.width, factor, self.min_pixels, self.max_pixels)
        return height // self.patch_size, width // self.patch_size

    def patches(self, grids: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """Return the model's image arguments: grey patches `[N, 3 * temporal * patch * patch]`, and their grids."""
        count, size = sum(h * w for h, w in grids), 3 * self.temporal_patch_size * self.patch_size**2
        return {"pixel_values": torch.zeros(count, size), "image_grid_thw": torch.tensor([(1, h, w) for h, w in grids])}


class Tokens:
    """Substitute for a tokenizer or processor that returns meaningless token ids.

    `model_max_length`: length of padded texts if `max_length` is not given. `end`: id of the last token. `picture`:
    image preprocessing of a processor.
    """

    def __init__(self, model_max_length: int = 512, end: int = 2, picture: Picture | None = None) -> None:
        self.picture = picture
        self.model_max_length = model_max_length
        self.tokenizer_max_length = model_max_length
        self.padding_side = "right"
        self.pad_token, self.eos_token, self.bos_token, self.unk_token = "<pad>", "<end>", "<begin>", "<unknown>"
        self.pad_token_id, self.eos_token_id, self.bos_token_id, self.unk_token_id = 0, end, 1, 0
        self.tokenizer = self  # attribute of processors
        self.added_tokens_encoder: dict[str, int] = {}

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Return the token ids of a text."""
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
        assert self.picture is not None
        before, *after = text.split(PLACE)
        tokens = [self.picture.token] * (grid[0] * grid[1] // self.picture.merge_size**2)
        return self.encode(before)[:-1] + tokens * len(after) + self.encode("".join(after))

    def apply_chat_template(self, messages: Any, *_: Any, tokenize: bool = True, **options: Any) -> Any:
        """Return the text or the tokens of one or several conversations."""
        several = bool(messages) and isinstance(messages[0], list)
        texts = [_text(conversation) for conversation in (messages if several else [messages])]
        if tokenize:
            return self(texts, **options)
        return texts if several else texts[0]

    def batch_decode(self, ids: Sequence[Any], *_: Any, **__: Any) -> list[str]:
        """Return an empty text for each row of ids."""
        return ["" for _ in ids]

    def tokenize(self, text: str, *_: Any, **__: Any) -> list[str]:
        """Return a text's tokens as strings."""
        return [self.unk_token] * len(self.encode(text))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(_text(v) for k, v in value.items() if k != "type")
    return " ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
