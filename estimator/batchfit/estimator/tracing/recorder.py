"""Sees every operator that runs, and records what it allocates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchfit.estimator.errors import TraceError

from .follower import Follower
from .kernels import CallContext
from .ledger import Ledger, Phase
from .operators import Operator

aten = torch.ops.aten

# References to a gradient that only the engine's buffer holds, as seen from a dispatch mode: of the
# tensor the buffer, the call's arguments (boxed and unboxed) and the Python object; of the storage
# the tensor and the Python object. A test measures them.
_SOLE_TENSOR_USES = 4
_SOLE_STORAGE_USES = 2


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
        #: code of the function that starts the autograd engine (see patches)
        self.engine_caller: CodeType | None = None
        self._device_type = device_type
        self._call = call
        self._operators: dict[Any, Operator] = {}
        self._place: bool | None = None
        if call is not None:
            call.attach(self.ledger)

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
            if func is aten.add.Tensor and self._accumulates(args, sys._getframe(1)):
                return self._add_in_place(args)
            return self._dispatch(func, args, kwargs or {})

    def _accumulates(self, args: tuple[Any, ...], caller: FrameType) -> bool:
        """Whether the autograd engine adds up gradients and would do so in place.

        InputBuffer::accumulate (torch/csrc/autograd/input_buffer.cpp) adds in place into a dense
        gradient that nobody else holds, but not under a dispatch mode, so it must be told apart
        here: called by the engine with no Python between, and with no more references than such a
        call has.
        """
        if self.ledger.phase is not Phase.BACKWARD or torch.is_grad_enabled():
            return False
        if caller.f_code is not self.engine_caller or len(args) != 2:
            return False
        old, new = args
        return (
            old.shape == new.shape
            and old.dtype is new.dtype
            and old._use_count() == _SOLE_TENSOR_USES
            and torch._C._storage_Use_Count(old.untyped_storage()._cdata) == _SOLE_STORAGE_USES
            and torch._prims_common.is_non_overlapping_and_dense(old)
        )

    def _add_in_place(self, args: tuple[Any, ...]) -> Any:
        old, new = args
        if self._device_type == "cpu":
            return old.add_(new)
        self.follower.values.forget(old.untyped_storage()._cdata)
        return old

    def _info(self, func: Any) -> Operator:
        op = self._operators.get(func)
        if op is None:
            op = self._operators[func] = Operator(func)
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
            return self.follower.scalar(tensors[0])
        if func is aten.index.Tensor:
            args = self._without_masks(op, args)
        elif op.data_dependent:
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
