"""What simulated kernels may ask and tell, and the table of them.

A kernel stands for an operator whose allocations on CUDA differ from those of torch's meta kernel.
It returns the outputs, empty meta tensors with CUDA's memory format, and tells the call context of
buffers that live only while it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from batchfit.estimator.errors import WorkloadError
from batchfit.estimator.gpus import GPU
from batchfit.estimator.units import KIB

from .ledger import Category, Ledger, Phase
from .workspaces import (
    WORKSPACES,
    ReductionRule,
    SizeRule,
    reduced_dimensions,
    reduction_numbers,
)

if TYPE_CHECKING:
    from batchfit.estimator.cuda_rules.packed import HostValues

Kernel = Callable[["CallContext", Any, tuple[Any, ...], dict[str, Any]], Any]
KERNELS: dict[Any, Kernel] = {}

# cuBLAS workspace (CUDABlas / CublasHandlePool.cpp, parseChosenWorkspaceSize): the default
# :4096:2:16:8 and, on Hopper and later, :4096:8. Confirmed as 8,519,680 and 33,554,432 bytes on
# public allocator traces (tests/data/oracle/README.md, item 1).
_WORKSPACE_DEFAULT = ":4096:2:16:8"
_WORKSPACE_HOPPER = ":4096:8"

_CUBLAS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv",
    "aten::dot", "aten::vdot", "aten::addbmm", "aten::addmm_", "aten::baddbmm_",
    "aten::_addmm_activation", "aten::linalg_solve_triangular", "aten::triangular_solve",
    "aten::_int_mm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::linear",
}  # fmt: skip


def uses_cublas(func: Any) -> bool:
    """Whether the operator takes a cuBLAS handle (and thereby its workspace)."""
    return func._schema.name in _CUBLAS


def cublas_workspace_bytes(capability: tuple[int, int], config: str | None = None) -> int:
    """Bytes of one cuBLAS workspace.

    Args:
        capability: of the GPU; (9, 0) and later have the larger default.
        config: ``CUBLAS_WORKSPACE_CONFIG``, a list of ``:KIB:COUNT``; None takes the environment.

    Raises:
        WorkloadError: the setting cannot be read.

    >>> cublas_workspace_bytes((8, 0), ""), cublas_workspace_bytes((9, 0), "")
    (8519680, 33554432)
    """
    if config is None:
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    config = config or (_WORKSPACE_HOPPER if capability >= (9, 0) else _WORKSPACE_DEFAULT)
    numbers = [n for n in config.split(":") if n]
    if len(numbers) % 2 or not all(n.isdigit() for n in numbers):
        raise WorkloadError(
            f"CUBLAS_WORKSPACE_CONFIG is {config!r}; it must be pairs of KiB and count, as :4096:8"
        )
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return sum(int(size) * KIB * int(count) for size, count in pairs)


class CallContext:
    """What kernels may ask and tell: scratch buffers, the workspaces of libraries.

    Args:
        gpu: decides what kernels allocate.
        workspaces: which of WORKSPACES are recorded.
    """

    def __init__(self, gpu: GPU, *, workspaces: Collection[str] = WORKSPACES) -> None:
        self.gpu = gpu
        self.workspaces = frozenset(workspaces)
        self._ledger: Ledger | None = None
        self._cublas_threads: set[bool] = set()
        self._pending: list[int] = []
        self._queued: list[tuple[SizeRule, tuple[int, ...], str]] = []

    def attach(self, ledger: Ledger, host: HostValues) -> None:
        """The ledger that is told, and who reads host tensors."""
        self._ledger = ledger
        self.host = host
        self._cublas_threads.clear()

    def scratch(self, sizes: Sequence[int], operator: str) -> None:
        """Buffers that live until the running operator has returned its outputs."""
        assert self._ledger is not None
        self._pending += [self._ledger.transient(size, operator) for size in sizes if size]

    def buffers(self, sizes: Sequence[int], operator: str) -> None:
        """As :meth:`scratch`, of a kernel's own making: left out with the kind "kernels"."""
        if "kernels" in self.workspaces:
            self.scratch(sizes, operator)

    def passing(self, sizes: Sequence[int], operator: str) -> None:
        """As :meth:`buffers`, but gone, all at once, before the running operator goes on."""
        assert self._ledger is not None
        if "kernels" not in self.workspaces:
            return
        for index in [self._ledger.transient(size, operator) for size in sizes if size]:
            self._ledger.release(index)

    def born(self, tensor: Tensor, operator: str, opaque: bool = False) -> None:
        """Record an output now, where what the kernel takes after it is not alive with the rest."""
        assert self._ledger is not None
        self._ledger.register(tensor, operator, True, opaque)

    def note(self, text: str) -> None:
        """Something the reader of the estimate should know."""
        assert self._ledger is not None
        self._ledger.note(text)

    def convolution(self, size: int, operator: str, required: bool) -> None:
        """cuDNN takes a workspace, if it gets it, and gives it back."""
        assert self._ledger is not None
        if not size:
            return
        if required and "transposes" in self.workspaces:
            self._ledger.release(self._ledger.transient(size, operator, Category.WORKSPACE))
        elif not required and "convolutions" in self.workspaces:
            self._ledger.optional(size, operator)

    def by_rule(self, rule: SizeRule, numbers: tuple[int, ...], operator: str) -> None:
        """A buffer of the running operator's kernel, whose size a rule gives."""
        if "kernels" in self.workspaces:
            self._queued.append((rule, numbers, operator))

    def reduction(self, tensor: Tensor, dims: Any, accumulator: int, operator: str) -> None:
        """The running operator reduces a tensor: its kernel may stage partial results."""
        if "kernels" not in self.workspaces or not tensor.numel():
            return
        reduced = reduced_dimensions(tensor, dims)
        numbers = reduction_numbers(tensor)
        for semaphores in (False, True):
            rule = ReductionRule(
                reduced, tensor.element_size(), accumulator, self.gpu.sm_count,
                self.gpu.threads_per_sm, semaphores,
            )  # fmt: skip
            self.by_rule(rule, numbers, operator)

    def finish(self) -> None:
        """The running operator has its outputs: what it allocates after them comes and goes."""
        assert self._ledger is not None
        for rule, numbers, operator in self._queued:
            self._pending.append(self._ledger.transient_by_rule(rule, numbers, operator))
        self._queued.clear()
        while self._pending:
            self._ledger.release(self._pending.pop())

    def gemm(self) -> None:
        """A matrix product runs: the first one on each thread allocates a cuBLAS workspace.

        The autograd engine runs CUDA nodes on a thread of its own, so training has two.
        """
        if "cublas" not in self.workspaces:
            return
        assert self._ledger is not None
        engine_thread = self._ledger.phase is Phase.BACKWARD
        if engine_thread not in self._cublas_threads:
            self._cublas_threads.add(engine_thread)
            size = cublas_workspace_bytes(self.gpu.capability)
            self._ledger.transient(size, "cublasCreate", Category.WORKSPACE)


def kernel(*overloads: Any) -> Callable[[Kernel], Kernel]:
    """Register what runs in the place of these operator overloads; each may have one kernel."""

    def register(function: Kernel) -> Kernel:
        for overload in overloads:
            if overload in KERNELS:
                raise ValueError(f"{overload} has a kernel already")
            KERNELS[overload] = function
        return function

    return register


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements."""
    return tensor.numel() * tensor.element_size()


def empty(shape: Sequence[int], like: Tensor, memory_format: torch.memory_format) -> Tensor:
    """A new tensor of the shape, with another's dtype."""
    return torch.empty(shape, dtype=like.dtype, device="meta", memory_format=memory_format)


def copy_bytes(tensor: Any, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes of the copy that ``tensor.contiguous(memory_format=...)`` makes; 0 where none."""
    if not isinstance(tensor, Tensor) or tensor.is_contiguous(memory_format=memory_format):
        return 0
    return nbytes(tensor)
