"""Sees every operator that runs, and records what it allocates."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchfit.estimator.errors import TraceError

from .calls import CallContext
from .follower import Follower
from .kernels_index import index_put_accumulate
from .ledger import Ledger, Phase
from .operators import Operator

aten = torch.ops.aten

# References to a gradient that only the engine's buffer holds, as seen from a dispatch mode: of the
# tensor the buffer, the call's arguments (boxed and unboxed) and the Python object; of the storage
# the tensor and the Python object. A test measures them.
_SOLE_TENSOR_USES = 4
_SOLE_STORAGE_USES = 2

# A step of a 100-layer model is some ten thousand calls; a loop that does not end is stopped here.
_MOST_CALLS = 2_000_000

# Operator -> the in-place one that CUDA runs in its place (see Recorder._in_place).
_WRITTEN_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
# What may stand between the engine and a dispatch mode: torch's wrappers, and our own kernels above
# autograd, which operators of autocast's promote list pass (scatter_add, index_put).
_ENGINE_WRAPPERS = (
    os.path.join("torch", "_ops.py"),
    os.path.join("cuda_rules", "autocast.py"),
    os.path.join("cuda_rules", "dispatch.py"),
    os.path.join("torch", "autograd", "graph.py"),
    os.path.join("torch", "_compile.py"),
    os.path.join("torch", "_dynamo", "eval_frame.py"),
)


def _dense(tensor: Tensor) -> bool:
    """is_non_overlapping_and_dense: some order of the dimensions makes the tensor contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what each operator allocates, and when it is given back.

    Args:
        device_type: where tensors live: "meta" for a trace, "cpu" to record a real step.
        call: the simulated kernels' context; None leaves every kernel to torch.

    Attributes:
        ledger: births and deaths.
        follower: values of small tensors.
        on_backward_end: told when a backward pass has ended, while its gradients are in place.
    """

    def __init__(self, device_type: str = "meta", *, call: CallContext | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.follower = Follower(self.ledger)
        self.on_backward_end: Callable[[], None] | None = None
        #: the phase that an exception came out of, where it is known
        self.failed_phase: Phase | None = None
        self._calls = 0
        #: code of the function that starts the autograd engine (see patches)
        self.engine_caller: CodeType | None = None
        self._device_type = device_type
        self._call = call
        self._operators: dict[Any, Operator] = {}
        self._place: bool | None = None
        if call is not None:
            call.attach(self.ledger, self.follower)

    @contextmanager
    def placing(self, on_device: bool) -> Iterator[None]:
        """New storages within the block are on the GPU (True) or on the host (False)."""
        before, self._place = self._place, on_device
        try:
            yield
        finally:
            self._place = before

    def close(self) -> None:
        """The run is over: what is alive now is alive at the end of the timeline."""
        self.ledger.close()
        self.follower.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if func in _WRITTEN_IN_PLACE and self._in_place(func, args):
                return self._write_in_place(func, args, kwargs or {})
            return self._dispatch(func, args, kwargs or {})

    def _in_place(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether the autograd engine writes into the first argument, but not under a mode.

        Two places in C++ ask isTensorSubclassLike, which any dispatch mode makes true:
        InputBuffer::accumulate (torch/csrc/autograd/input_buffer.cpp) adds gradients in place if
        nobody else holds the first, told here by the number of references; and the backward
        formulas of indexing (FunctionsManual.cpp) write into zeros that they have just made.
        """
        if self.ledger.phase is not Phase.BACKWARD or torch.is_grad_enabled():
            return False
        if not self._called_by_engine(sys._getframe(2)):
            return False
        if func is not aten.add.Tensor:
            return torch._C._current_autograd_node() is not None
        if len(args) != 2:
            return False
        old, new = args
        return (
            old.shape == new.shape
            and old.dtype is new.dtype
            and old._use_count() == _SOLE_TENSOR_USES
            and torch._C._storage_Use_Count(old.untyped_storage()._cdata) == _SOLE_STORAGE_USES
            and _dense(old)
        )

    def _called_by_engine(self, frame: FrameType | None) -> bool:
        """Whether no Python code stands between the autograd engine and the operator.

        From torch 2.14 on, torch's own wrappers may stand above the function that starts the
        engine; see _ENGINE_WRAPPERS.
        """
        while frame is not None and frame.f_code.co_filename.endswith(_ENGINE_WRAPPERS):
            frame = frame.f_back
        return frame is not None and frame.f_code is self.engine_caller

    def _write_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Tensor = args[0]
        if self._device_type == "cpu":
            return _WRITTEN_IN_PLACE[func](*args, **kwargs)
        accumulates = func is aten.index_put.default and args[3:4] == (True,)
        if accumulates and self._call is not None:
            index_put_accumulate(self._call, args)
            self._call.finish()
        self.follower.values.forget(target.untyped_storage()._cdata)
        return target

    def _info(self, func: Any) -> Operator:
        op = self._operators.get(func)
        if op is None:
            op = self._operators[func] = Operator(func)
        return op

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = self._info(func)
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise TraceError(
                f"{self.follower.where()} is still running after {_MOST_CALLS:,} operators; a loop "
                "that waits for a value which only real data has does not end here"
            )
        if self._device_type == "cpu":
            out = func(*args, **kwargs)
            self._record(out, op, True)
            return out
        tensors, args, kwargs = self._prepare(args, kwargs)
        on_device = self._on_device(tensors)
        if func is aten._local_scalar_dense.default:
            return self.follower.scalar(tensors[0])
        if func is aten.index.Tensor:
            args = self._without_masks(op, args)
        elif op.data_dependent and op.kernel is None:
            return self.follower.data_dependent(func, op, args, kwargs, tensors, on_device)
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
        self.follower.follow(func, op, args, kwargs, tensors, out)
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
            return value if value.is_meta else self.follower.lift(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._lift_any(item) for item in value)
        return value

    def _on_device(self, tensors: list[Tensor]) -> bool:
        if self._place is not None:
            return self._place
        for tensor in tensors:
            if self.ledger.on_device(tensor):
                return True
        # Made from host tensors only; or by C++ with the options of a GPU tensor.
        return not tensors

    def _record(self, out: Any, op: Operator, on_device: bool) -> None:
        if not op.returns:
            return
        if isinstance(out, Tensor):
            if out.device.type == self._device_type:
                self.ledger.register(out, op.name, on_device)
        elif isinstance(out, (list, tuple)):
            for item in out:
                if isinstance(item, Tensor):
                    if item.device.type == self._device_type:
                        self.ledger.register(item, op.name, on_device)
                elif isinstance(item, (list, tuple)):
                    self._record(item, op, on_device)

    def _without_masks(self, op: Operator, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Indexing by a boolean mask: CUDA turns the mask into indices first, and so do we."""
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                found = self.follower.data_dependent(
                    aten.nonzero.default,
                    self._info(aten.nonzero.default),
                    (index,),
                    {},
                    [index],
                    self.ledger.on_device(index),
                )
                indices += found.unbind(1)
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _unsupported(self, op: Operator, error: Exception) -> TraceError:
        return TraceError(
            f"{self.follower.where()} calls {op.name}, which cannot run without data "
            f"({str(error).splitlines()[0][:120]}); leave that part out of the workload, or give "
            "it a meta kernel with torch.library.register_fake"
        )
