"""A simulated accelerator: a device whose tensors are wrapped CPU tensors, with the restrictions of a GPU.

Like CUDA, `pretended:0` refuses operations on tensors of two devices (except scalars and indices), `numpy()`, and CPU
generators. Copies with `non_blocking` are asynchronous: a host tensor holds NaN until its stream is synchronised, the
source of a copy must not change before the copy has run, and a stream may only read tensors that it has written or
whose stream it has waited for. Kernel launches, copies and synchronisations are counted, with the line of gerl that
causes them.

Built on torch's Python backend for PrivateUse1. Parameters wrapped by `movable` change devices in place, as on a GPU
(`module.to`, `p.data = ...`).
"""

import contextlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.backend_registration as registration
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import gerl

if not hasattr(registration, "_DummyBackendModule"):
    pytest.skip("the simulated accelerator needs torch 2.10", allow_module_level=True)
PACKAGE = f"{Path(gerl.__file__).parent}/"
NAME = "pretended"
HOST = torch.device("cpu")
aten = torch.ops.aten

# --- Streams


@dataclass(eq=False)
class Stream:
    """Stream; `seen`: the number of operations of each other stream that this one has waited for."""

    device: Any = None
    priority: int = 0
    ticks: int = 0
    seen: dict["Stream", int] = field(default_factory=dict)
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # on the host, and their values
    reading: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of the host, and as they were

    def wait_stream(self, other: "Stream") -> None:
        self.seen[other] = other.ticks
        for third, tick in other.seen.items():
            self.seen[third] = max(tick, self.seen.get(third, 0))

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        COUNTS.note("sync")
        self.finish()

    def finish(self) -> None:
        """Complete the pending copies of this stream and of those that it has waited for."""
        for host, value in self.arriving:
            host.copy_(value)
        for host, before in self.reading:
            if not torch.equal(host, before):
                raise Racing("memory of the host changed before an asynchronous copy had read it")
        self.arriving, self.reading = [], []
        for other in list(self.seen):
            if other.arriving or other.reading:
                other.finish()

    def query(self) -> bool:
        return not self.arriving

    def __enter__(self) -> "Stream":
        self._outer = current_stream()
        _LOCAL.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _LOCAL.stream = self._outer


@dataclass(eq=False)
class Event:
    """A place in a stream."""

    enable_timing: bool = False
    stream: Stream | None = None
    seen: dict[Stream, int] = field(default_factory=dict)

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.seen = self.stream.seen | {self.stream: self.stream.ticks}

    def wait(self, stream: Stream | None = None) -> None:
        waiting = stream or current_stream()
        for other, tick in self.seen.items():
            if other is not waiting:
                waiting.seen[other] = max(tick, waiting.seen.get(other, 0))

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def query(self) -> bool:
        return True


_LOCAL, DEFAULT = threading.local(), Stream()


def current_stream(device: object = None) -> Stream:
    found: Stream = getattr(_LOCAL, "stream", DEFAULT)
    return found


class Racing(RuntimeError):
    """Work on a stream depends on work of another for which it has not waited."""


class Mixed(RuntimeError):
    """Tensors or generators of two devices meet in one operation."""


# --- What torch calls a device module: `torch.pretended`


class _Module(registration._DummyBackendModule):  # type: ignore[misc]
    Stream, Event = Stream, Event
    current_stream = staticmethod(current_stream)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_autocast_enabled(self) -> bool:
        return False

    def stream(self, stream: Stream) -> Stream:
        return stream

    def synchronize(self, device: object = None) -> None:
        current_stream().synchronize()

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def max_memory_reserved(self, device: object = None) -> int:
        return 0

    def reset_peak_memory_stats(self, device: object = None) -> None: ...


registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
DEVICE = torch.device(NAME, 0)


def on_device(device: object) -> bool:
    return device is not None and torch.device(device).type == NAME  # type: ignore[arg-type]


# --- Counts


class Counts:
    """Numbers of launches, copies and synchronisations, and where in gerl they were caused."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, bool]] = []  # kind, line of gerl, whether gerl itself caused it
        self.traced = False

    def note(self, kind: str) -> None:
        self.events.append((kind, *(_site() if self.traced and kind != "launch" else ("", False))))

    @contextlib.contextmanager
    def counting(self) -> Iterator["Counts"]:
        """Reset the counts, and record source lines in the block."""
        self.events, self.traced = [], True
        try:
            yield self
        finally:
            self.traced = False

    def total(self, kind: str, since: int = 0, until: int | None = None) -> int:
        return sum(event[0] == kind for event in self.events[since:until])

    def own(self, kind: str, since: int = 0, until: int | None = None) -> Counter[str]:
        """Lines of gerl that caused events of `kind` without another library in between."""
        return Counter(line for found, line, own in self.events[since:until] if found == kind and own)


def _site() -> tuple[str, bool]:
    """Return the innermost line of gerl, and whether no other library but torch was called from there."""
    frame, own = sys._getframe(2), True
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}", own
        own = own and not ("site-packages" in file and "/torch/" not in file)
        frame = frame.f_back  # type: ignore[assignment]
    return "", False


COUNTS = Counts()

# --- Tensors


class _Move(torch.autograd.Function):
    """Copy of a movable parameter on the device, with its graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        return _moved(tensor, True, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.cpu(), None


class Pretended(torch.Tensor):
    """A tensor on the device, or one of a movable parameter that is on the host."""

    raw: torch.Tensor
    on_host: bool
    writer: Stream | None
    tick: int

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False, on_host: bool = False) -> "Pretended":
        made: Pretended = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.raw, made.on_host, made.writer, made.tick = raw, on_host, None, 0
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.raw!r}, on {'the host' if self.on_host else NAME})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return HOST if self.on_host else DEVICE

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        given = value if isinstance(value, Pretended) else Pretended(value.detach(), on_host=True)
        torch.Tensor.data.__set__(self, given)  # type: ignore[attr-defined]
        self.raw, self.on_host, self.writer, self.tick = given.raw, given.on_host, given.writer, given.tick

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        parameter = isinstance(self, torch.nn.Parameter)
        if not self.on_host:
            moved = super().to(*args, **kwargs)
            return moved if _at_device(moved) or not parameter else Pretended(moved.detach(), on_host=True)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if on_device(device):
            options = {"dtype": dtype, "memory_format": memory_format, "non_blocking": non_blocking}
            return _Move.apply(self, options)  # type: ignore[no-any-return,no-untyped-call]
        raw = self.raw.to(device=device, dtype=dtype, copy=copy)
        return Pretended(raw, on_host=True) if parameter and raw.device.type == "cpu" else raw

    def tolist(self) -> Any:
        COUNTS.note("sync")
        return self.raw.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        if self.on_host:
            return self.raw.detach().numpy()
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.on_host:
            raise Mixed("a tensor on the device is pickled: copy it to the host first")
        return self.raw.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pretended":
        copied = Pretended(self.raw.detach().clone(), self.requires_grad, self.on_host)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)  # type: ignore[assignment]
        return memo.setdefault(id(self), copied)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return execute(func, args, kwargs or {})


COPIES = {aten._to_copy.default, aten.copy_.default}
TAKE_INDICES = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
SYNCHRONISING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
}
NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "_local_scalar_dense",
}


def _flat(values: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _flat(value, found)
    return found


def _raw(value: Any) -> Any:
    if isinstance(value, Pretended):
        return value.raw
    if isinstance(value, list | tuple):
        return type(value)(_raw(v) for v in value)
    return value


def _at_device(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, Pretended) and not tensor.on_host


def execute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of which at least one tensor, or the result, is on the device."""
    tensors = _flat(kwargs.values(), _flat(args, []))
    here = [t for t in tensors if _at_device(t)]
    asked = kwargs.get("device")
    out = on_device(asked) if asked is not None else bool(here)
    if func is aten.copy_.default:
        return _copy_into(args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False))
    if func is aten._to_copy.default and bool(here) != out and str(asked) != "meta":
        return _moved(args[0], out, kwargs)
    if here and len(here) < len(tensors) and func not in TAKE_INDICES:
        for t in tensors:
            if not _at_device(t) and t.dim():
                raise Mixed(f"{func}: tensors on {DEVICE} and {t.device} meet, the latter {tuple(t.shape)} {t.dtype}")
    if isinstance(kwargs.get("generator"), torch.Generator) and out and kwargs["generator"].device.type == "cpu":
        raise Mixed(f"{func}: a generator of the CPU for a tensor on {DEVICE}")
    _read(here)
    if func in SYNCHRONISING and here:
        COUNTS.note("sync")
    name = func._schema.name.partition("::")[2]
    if out and not func.is_view and name not in NO_LAUNCH:
        COUNTS.note("launch")
    given = {k: _raw(v) for k, v in kwargs.items()}
    if given.get("device") is not None and str(asked) != "meta":
        given["device"] = "cpu"
    given.pop("pin_memory", None)
    result = func(*map(_raw, args), **given)
    if func is aten.detach.default and not out:
        return Pretended(result, on_host=True)
    return _wrapped(result, here) if out else result


def _wrapped(result: Any, here: list[torch.Tensor]) -> Any:
    """Wrap the tensors of a result, those of the arguments as they are."""
    known = {id(t.raw): t for t in here if isinstance(t, Pretended)}

    def wrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made = known.get(id(value))
            return _written(Pretended(value) if made is None else made)
        if isinstance(value, list | tuple):
            return type(value)(map(wrap, value))
        return value

    return wrap(result)


def _written(tensor: Pretended) -> Pretended:
    stream = current_stream()
    stream.ticks += 1
    tensor.writer, tensor.tick = stream, stream.ticks
    return tensor


def _read(tensors: list[torch.Tensor]) -> None:
    stream = current_stream()
    for t in tensors:
        writer = t.writer  # type: ignore[attr-defined]
        if writer not in (None, stream) and stream.seen.get(writer, 0) < t.tick:  # type: ignore[attr-defined]
            raise Racing(f"a stream reads {tuple(t.shape)} which another writes: wait for that stream first")


def _copy_into(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    to, of = _at_device(target), _at_device(source)
    _read([t for t in (target, source) if _at_device(t)])
    if to != of:
        COUNTS.note("to device" if to else "to host")
    elif to:
        COUNTS.note("launch")
    stream = current_stream()
    if of and not to:
        value = _raw(source).to(target.dtype)
        if non_blocking:
            stream.arriving.append((_raw(target), value.expand_as(target).clone()))
            _poison(_raw(target))
            return target
        COUNTS.note("sync")
        stream.finish()
    _raw(target).copy_(_raw(source))
    if to and not of and non_blocking and is_pinned(source):
        stream.reading.append((_raw(source), _raw(source).clone()))
    return _written(target) if to else target  # type: ignore[arg-type]


def _moved(source: torch.Tensor, to: bool, kwargs: dict[str, Any]) -> torch.Tensor:
    """Copy `source` to the other kind of memory, in a dtype and layout of its own."""
    raw: torch.Tensor = _raw(source)
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
    empty = torch.empty_like(raw, **options)
    target: torch.Tensor = Pretended(empty) if to else empty
    return _copy_into(target, source, bool(kwargs.get("non_blocking")))


def _poison(host: torch.Tensor) -> None:
    if host.is_floating_point() or host.is_complex():
        host.fill_(float("nan"))
    elif host.dtype == torch.bool:
        host.logical_not_()
    else:
        host.fill_(torch.iinfo(host.dtype).min)


_PINNED: set[int] = set()


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _PINNED


def _pin(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    copied = tensor.clone()
    _PINNED.add(copied.untyped_storage().data_ptr())
    return copied


# --- Operations that reach the backend below the wrapper: factories, and what autograd's threads call

_library = torch.library.Library("aten", "IMPL")


def _implements(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, function, "PrivateUse1")
        return function

    return register


@_implements("empty.memory_format")
def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    return _written(Pretended(torch.empty(size, dtype=dtype, memory_format=memory_format)))


@_implements("empty_strided")
def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    return _written(Pretended(torch.empty_strided(size, stride, dtype=dtype)))


@_implements("_copy_from")
def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy_into(target, source, non_blocking)


@_implements("_copy_from_and_resize")
def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    _raw(target).resize_(source.shape)
    return _copy_into(target, source, False)


@_implements("_local_scalar_dense")
def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    COUNTS.note("sync")
    return _raw(tensor).item()


# --- Modules whose parameters can move


def movable(module: torch.nn.Module) -> torch.nn.Module:
    """Wrap the parameters and buffers of `module` on the host, so that they can change devices in place."""
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        if isinstance(tensor, Pretended) or is_traceable_wrapper_subclass(tensor):
            continue  # a quantised weight moves the tensors that it consists of
        wrapped: torch.Tensor = Pretended(tensor.detach(), on_host=True)
        if isinstance(tensor, torch.nn.Parameter):
            wrapped = torch.nn.Parameter(wrapped, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, wrapped)  # it stays the same object, for whoever knows it
    return module


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, also for a parameter that was made on the host, such as a LoRA's, and moves."""
    if isinstance(value, Pretended) and not isinstance(tensor, Pretended):
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(value, tensor.requires_grad))
    else:
        torch._C.TensorBase.data.__set__(tensor, value)  # type: ignore[attr-defined]


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Let memory be pinned and parameters move to the device in the block; its streams have nothing to do yet."""
    data = property(torch._C.TensorBase.data.__get__, _set_data)  # type: ignore[attr-defined]
    replaced = {"pin_memory": _pin, "is_pinned": is_pinned, "data": data}
    kept = {name: torch.Tensor.__dict__[name] for name in replaced if name in torch.Tensor.__dict__}
    for name, value in replaced.items():
        setattr(torch.Tensor, name, value)
    DEFAULT.__init__()  # type: ignore[misc]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in replaced:
            setattr(torch.Tensor, name, kept[name]) if name in kept else delattr(torch.Tensor, name)
        _PINNED.clear()


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Place the models of this process's workers on the device within the block."""
    from gerl.model import loading  # the accelerator itself needs nothing of gerl

    place = loading.place

    def placed(pipe: Any, *args: Any, **kwargs: Any) -> None:
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                movable(part)
        place(pipe, *args, **kwargs)

    loading.place = placed
    try:
        with pretending():
            yield
    finally:
        loading.place = place
