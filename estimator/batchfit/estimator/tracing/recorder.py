"""Births and deaths of storages, seen under every operator that runs."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import DataDependentError, TraceError
from .kernels import KERNELS, CallContext, uses_cublas
from .modules import ModuleTracker
from .values import UNKNOWN, Values

aten = torch.ops.aten


class Category(str, Enum):
    """What a storage is for. Activations are what is alive at the end of the forward pass."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    AUTOCAST_COPIES = "autocast copies"
    TEMPORARIES = "temporaries"
    WORKSPACE = "workspace"

    def __str__(self) -> str:
        return self.value


class Phase(str, Enum):
    """Where in a step something happens."""

    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    def __str__(self) -> str:
        return self.value


@dataclass(slots=True)
class Log:
    """Everything recorded, in columns. Storage i has ``sizes[i]`` bytes, and so on.

    ``events`` holds i for the birth of storage i and ~i (negative) for its death; ``marks`` the
    position in ``events`` at which each phase began.
    """

    sizes: list[int] = field(default_factory=list)
    itemsizes: list[int] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    modules: list[int] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    categories: list[Category | None] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, Phase, int]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


class _Operator:
    """What is known of an operator from its schema; looked up once per operator."""

    __slots__ = (
        "cublas",
        "data_dependent",
        "deterministic",
        "kernel",
        "mutates",
        "name",
        "returns",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        # Results that may be new storages: those without an alias annotation.
        self.returns = any(r.alias_info is None for r in schema.returns)
        self.mutates = tuple(
            i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        )
        self.data_dependent = torch.Tag.dynamic_output_shape in func.tags
        self.deterministic = Values.deterministic(func)
        self.kernel = KERNELS.get(func)
        self.cublas = uses_cublas(func)


class Recorder(TorchDispatchMode):
    """Records what each operator allocates, and when it is given back.

    Tensors live on ``device_type`` ("meta" for a trace, "cpu" to record a real step on the CPU).
    On meta a storage is either on the simulated GPU, and recorded, or on the host, and only known.
    """

    def __init__(self, device_type: str = "meta", *, call: CallContext | None = None) -> None:
        super().__init__()
        self.log = Log()
        self.modules = ModuleTracker()
        self.values = Values()
        self.phase = Phase.INIT
        self.step = 0
        self.category: Category | None = None
        self._device_type = device_type
        self._call = call
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._operators: dict[Any, _Operator] = {}
        self._place: bool | None = None
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}
        self._closed = False
        #: told when a backward pass has ended, while its gradients are in place
        self.on_backward_end: Callable[[], None] | None = None
        if call is not None:
            call.attach(self)

    # -- what user-facing layers ask and tell ------------------------------------------------

    def on_device(self, tensor: Tensor) -> bool:
        """Whether a meta tensor stands for one on the GPU (and not on the host)."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return entry is None or entry[1] >= 0

    def index_of(self, tensor: Tensor) -> int | None:
        """The storage number of a recorded tensor."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry is not None and entry[1] >= 0 else None

    @contextmanager
    def placing(self, on_device: bool) -> Iterator[None]:
        """New storages within the block are on the GPU (True) or on the host (False)."""
        before, self._place = self._place, on_device
        try:
            yield
        finally:
            self._place = before

    def begin(self, phase: Phase) -> None:
        """From here on storages belong to this phase."""
        self.phase = phase
        self.log.marks.append((len(self.log.events), phase, self.step))

    def settle(self, tensor: Tensor, category: Category, module: int | None = None) -> None:
        """Say what a recorded tensor is for, and which module it belongs to; the first word holds."""
        index = self.index_of(tensor)
        if index is None or self.log.categories[index] is not None:
            return
        self.log.categories[index] = category
        if module is not None:
            self.log.modules[index] = module

    def transient(self, size: int, operator: str, category: Category | None = None) -> int:
        """Record a birth that no tensor stands for; returns its number for :meth:`release`."""
        return self._append(size, 1, operator, category)

    def release(self, index: int) -> None:
        """Record the death of a :meth:`transient`."""
        self.log.events.append(~index)

    def note(self, text: str) -> None:
        """Something the reader of the estimate should know; counted, said once."""
        self.log.notes[text] = self.log.notes.get(text, 0) + 1

    def close(self) -> None:
        """Stop recording deaths: what is alive now is alive at the end of the timeline."""
        self._closed = True
        self._alive.clear()
        self._lifted.clear()

    # -- births and deaths -------------------------------------------------------------------

    def _append(self, size: int, itemsize: int, operator: str, category: Category | None) -> int:
        log = self.log
        index = len(log.sizes)
        log.sizes.append(size)
        log.itemsizes.append(itemsize)
        log.operators.append(operator)
        log.modules.append(self._module())
        log.phases.append(self.phase)
        log.categories.append(category if category is not None else self.category)
        log.events.append(index)
        return index

    def _module(self) -> int:
        if self.phase is Phase.BACKWARD:
            node = torch._C._current_autograd_node()
            if node is not None and self.modules.current == 0:
                return self.modules.at_node(node._sequence_nr())
        return self.modules.current

    def _watch(self, storage: Any, index: int) -> None:
        key = storage._cdata

        def dies(_: Any, key: int = key, index: int = index) -> None:
            if self._closed:
                return
            self._alive.pop(key, None)
            self.values.forget(key)
            if index >= 0:
                self.log.events.append(~index)

        self._alive[key] = (weakref.ref(storage, dies), index)

    def _register(self, tensor: Tensor, operator: str, on_device: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        index = -1
        if on_device:
            index = self._append(storage.nbytes(), tensor.element_size(), operator, None)
        self._watch(storage, index)

    # -- the operator call -------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _info(self, func: Any) -> _Operator:
        op = self._operators.get(func)
        if op is None:
            op = self._operators[func] = _Operator(func)
        return op

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = self._info(func)
        if self._device_type == "cpu":
            out = func(*args, **kwargs)
            self._record(out, op, True)
            return out
        tensors, args, kwargs = self._prepare(args, kwargs)
        on_device = self._on_device(tensors)
        if func is aten._local_scalar_dense.default:
            return self._scalar(tensors[0])
        if func is aten.index.Tensor:
            args = self._without_masks(op, args)
        elif op.data_dependent:
            return self._data_dependent(func, op, args, kwargs, tensors, on_device)
        if op.cublas and on_device and self._call is not None:
            self._call.gemm()
        try:
            if op.kernel is not None and self._call is not None and on_device:
                out = op.kernel(self._call, func, args, kwargs)
                self._record(out, op, on_device)
                self._call.finish()
            else:
                out = func(*args, **kwargs)
                self._record(out, op, on_device)
        except NotImplementedError as error:
            raise self._unsupported(op, error) from error
        self._follow_values(func, op, args, kwargs, tensors, out)
        return out

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
        """Collect the tensor arguments; bring real CPU tensors in as host tensors on meta."""
        tensors: list[Tensor] = []
        foreign = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                tensors.append(value)
                foreign = foreign or not value.is_meta
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, Tensor):
                        tensors.append(item)
                        foreign = foreign or not item.is_meta
        if foreign:
            args = tuple(self._lift_any(a) for a in args)
            kwargs = {k: self._lift_any(v) for k, v in kwargs.items()}
            return self._prepare(args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "meta":
            kwargs = dict(kwargs, device=torch.device("meta"))
        return tensors, args, kwargs

    def _lift_any(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.is_meta else self.lift(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._lift_any(item) for item in value)
        return value

    def lift(self, real: Tensor) -> Tensor:
        """The host twin on meta of a real tensor; its data is not copied unless it is small."""
        found = self._lifted.get(id(real))
        if found is not None:
            return found[1]
        with torch._C._DisableTorchDispatch():
            twin = torch.empty_strided(
                real.size(), real.stride(), dtype=real.dtype, device="meta"
            ).requires_grad_(real.requires_grad and real.is_leaf)
            self._register(twin, "aten::to", False)
            if real.device.type == "cpu" and real.layout is torch.strided:
                self.values.put(twin, twin.untyped_storage()._cdata, real.detach())
        self._lifted[id(real)] = (real, twin)
        return twin

    def _on_device(self, tensors: list[Tensor]) -> bool:
        if self._place is not None:
            return self._place
        for tensor in tensors:
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is None or entry[1] >= 0:
                return True
        # Made from host tensors only; or by C++ with the options of a GPU tensor.
        return not tensors

    def _record(self, out: Any, op: _Operator, on_device: bool) -> None:
        if not op.returns:
            return
        if isinstance(out, Tensor):
            if out.device.type == self._device_type:
                self._register(out, op.name, on_device)
        elif isinstance(out, (list, tuple)):
            for item in out:
                if isinstance(item, Tensor):
                    if item.device.type == self._device_type:
                        self._register(item, op.name, on_device)
                elif isinstance(item, (list, tuple)):
                    self._record(item, op, on_device)

    # -- values ------------------------------------------------------------------------------

    def _value(self, tensor: Tensor) -> Tensor | None:
        return self.values.get(tensor, tensor.untyped_storage()._cdata)

    def known_value(self, tensor: Tensor) -> Tensor | None:
        """The value of a small tensor, where it is known."""
        if not tensor.is_meta:
            return tensor
        return self._value(tensor)

    def _follow_values(
        self, func: Any, op: _Operator, args: Any, kwargs: Any, tensors: list[Tensor], out: Any
    ) -> None:
        if func.is_view:
            return
        known = op.deterministic
        if known:
            for tensor in tensors:
                if not self.values.known(tensor.untyped_storage()._cdata):
                    known = False
                    break
        if op.mutates and not known and not self._overwrites(func, args):
            for i in op.mutates:
                if i < len(args):
                    self._forget(args[i])
            self._follow_uniform(op, tensors, out)
            return
        if not known and not op.mutates:
            if not tensors and isinstance(out, Tensor):
                draw = self.values.random(func, args, kwargs, out)
                if draw is not None:
                    self.values.put(out, out.untyped_storage()._cdata, draw)
            self._follow_uniform(op, tensors, out)
            return
        first = out[0] if isinstance(out, (list, tuple)) and out else out
        if isinstance(first, Tensor) and not self.values.small(first):
            for i in op.mutates:
                self._forget(args[i])
            return
        self._compute(func, op, args, kwargs, out)

    def _overwrites(self, func: Any, args: Any) -> bool:
        """Whether an in-place operator replaces the whole of a small storage by a constant."""
        if func not in (aten.fill_.Scalar, aten.zero_.default):
            return False
        target: Tensor = args[0]
        key = target.untyped_storage()._cdata
        if not self.values.known(key):
            whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
            if not whole or not self.values.small(target):
                return False
            self.values.put(target, key, torch.zeros((), dtype=target.dtype))
        return self.values.known(key)

    def _forget(self, target: Any) -> None:
        for tensor in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(tensor, Tensor):
                self.values.forget(tensor.untyped_storage()._cdata)

    def _compute(self, func: Any, op: _Operator, args: Any, kwargs: Any, out: Any) -> None:
        known = {k: self._shadow(v) for k, v in kwargs.items()}
        result = self.values.compute(func, tuple(self._shadow(a) for a in args), known)
        if result is UNKNOWN:
            for i in op.mutates:
                self._forget(args[i])
            return
        if not op.mutates:
            self._keep(out, result)

    def _keep(self, out: Any, result: Any) -> None:
        if isinstance(out, Tensor) and isinstance(result, Tensor):
            if out.shape == result.shape and out.dtype is result.dtype:
                self.values.put(out, out.untyped_storage()._cdata, result)
        elif isinstance(out, (list, tuple)) and isinstance(result, (list, tuple)):
            for one, value in zip(out, result, strict=False):
                self._keep(one, value)

    def _shadow(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._value(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._shadow(item) for item in value)
        return value

    def _follow_uniform(self, op: _Operator, tensors: list[Tensor], out: Any) -> None:
        """any/all/not of a tensor that is assumed uniform (see isnan, isinf, isfinite)."""
        if op.name not in ("aten::any", "aten::all", "aten::logical_not") or not tensors:
            return
        value = self.values.uniform(tensors[0].untyped_storage()._cdata)
        if value is not None:
            self.assume(out, value if op.name != "aten::logical_not" else not value)

    def assume(self, tensor: Tensor, value: bool) -> None:
        """Assume that every element of a boolean tensor is ``value``."""
        if self._device_type != "meta":
            return
        key = tensor.untyped_storage()._cdata
        self.values.mark_uniform(key, value)
        self.values.put(tensor, key, torch.tensor(value))

    def _scalar(self, tensor: Tensor) -> Any:
        value = self._value(tensor)
        if value is not None:
            return value.item()
        if tensor.is_floating_point():
            self.note(
                "a number that the code reads from the GPU (such as loss.item()) was taken as 0"
            )
            return 0.0
        raise DataDependentError(
            f"{self._where()} reads a {tensor.dtype} value that only real data can give (.item(), "
            "int(), bool() or a Python `if` on a tensor); pass inputs whose values are known, or "
            "give the workload a step that does not depend on it"
        )

    def refuse(self, what: str) -> None:
        """Raise: the code asks for data that does not exist."""
        raise DataDependentError(
            f"{self._where()} asks for the data of a tensor ({what}), which only a real run has; leave "
            "that out of the step"
        )

    def _where(self) -> str:
        path = self.modules.paths[self.modules.current]
        line = _user_line()
        return (f"module {path!r}" if path else "the step") + (f" ({line})" if line else "")

    def _data_dependent(
        self, func: Any, op: _Operator, args: Any, kwargs: Any, tensors: list[Tensor], device: bool
    ) -> Any:
        """nonzero, unique, masked_select: run on the known values, give back the shape found."""
        result: Any = UNKNOWN
        if all(self.values.known(t.untyped_storage()._cdata) for t in tensors):
            known = {k: self._shadow(v) for k, v in kwargs.items()}
            result = self.values.compute(func, tuple(self._shadow(a) for a in args), known)
        if result is UNKNOWN:
            raise DataDependentError(
                f"{self._where()} calls {op.name}, whose result has a size that only real data can "
                "tell; trace a part of the model without it, or give inputs whose values are known"
            )
        return self._wrap(result, op, device)

    def _without_masks(self, op: _Operator, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Indexing by a boolean mask: CUDA turns the mask into indices first, and so do we."""
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                found = self._data_dependent(
                    aten.nonzero.default, self._info(aten.nonzero.default), (index,), {}, [index],
                    self.on_device(index),
                )
                indices += found.unbind(1)
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _wrap(self, result: Any, op: _Operator, on_device: bool) -> Any:
        if isinstance(result, Tensor):
            twin = torch.empty_strided(
                result.size(), result.stride(), dtype=result.dtype, device="meta"
            )
            self._register(twin, op.name, on_device)
            self.values.put(twin, twin.untyped_storage()._cdata, result)
            return twin
        if isinstance(result, (list, tuple)):
            return type(result)(self._wrap(item, op, on_device) for item in result)
        return result

    def _unsupported(self, op: _Operator, error: Exception) -> TraceError:
        return TraceError(
            f"{self._where()} calls {op.name}, which cannot run without data "
            f"({str(error).splitlines()[0][:120]}); leave that part out of the workload, or give it "
            "a meta kernel with torch.library.register_fake"
        )


def _user_line() -> str:
    """File and line of the innermost Python frame that is neither torch's nor ours."""
    ours = __name__.rsplit(".", 2)[0]
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith((f"{ours}.", "torch.")) and name not in (ours, "torch"):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
