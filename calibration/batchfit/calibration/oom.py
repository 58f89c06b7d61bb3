"""Tell out of memory from every other error, in all the forms the backends raise it.

PyTorch raises ``torch.OutOfMemoryError`` where its own allocator fails. Libraries that allocate for
themselves, older versions, drivers and MIG slices say it in other words, as a ``RuntimeError``.
Two kinds of wording are kept apart: those that mean out of memory wherever they appear, and those
that *may* mean it and count only where the device is nearly full.
"""

from __future__ import annotations

import re

import torch

__all__ = ["is_out_of_memory", "out_of_memory_text"]

# Wordings that mean out of memory and nothing else. Where each comes from:
_CERTAIN = re.compile(
    "|".join(
        (
            r"(?:CUDA|HIP|XPU|MTIA|NPU) out of memory",  # the caching allocators
            r"MPS backend out of memory",  # aten/src/ATen/mps/MPSAllocator.mm
            r"(?:CUDA|HIP)(?: driver)? error: out of memory",  # a launch or a driver call
            r"(?:cuda|hip)ErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory",
            r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED|rocblas_status_memory_error",
            r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            r"miopenStatusAllocFailed|CUSOLVER_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED",
            r"CUFFT_ALLOC_FAILED|Failed to CUDA malloc|Failed to CUDA calloc",  # cuFFT; NCCL
            r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST|RESOURCES)\w*",  # oneAPI's unified runtime
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",  # c10 on the host
            # On MIG slices, Jetsons and in containers the allocator asks NVML for its message
            # when cudaMalloc has failed, and stumbles over the answer (pytorch issue 112377).
            r"NVML_SUCCESS == r.*INTERNAL ASSERT FAILED",
        )
    ),
    re.DOTALL,
)

# Wordings that a lack of memory is one cause of: cuDNN finds no engine whose workspace could be
# had, cuBLAS cannot make a handle.
_POSSIBLE = re.compile(
    r"unable to find an engine to execute this computation"
    r"|CUDNN_STATUS_NOT_SUPPORTED"
    r"|CUDNN_STATUS_EXECUTION_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_NOT_INITIALIZED"
)


def is_out_of_memory(error: BaseException, *, nearly_full: bool = False) -> bool:
    """Whether an error says that memory ran out.

    Args:
        error: what was raised; what it was raised *from* counts as well, what merely was being
            handled at that time does not.
        nearly_full: whether the device had next to nothing free; only then the wordings count
            that have other causes, too.

    >>> is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8.02 GB)"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    return _find(error, nearly_full) is not None


def out_of_memory_text(error: BaseException, *, nearly_full: bool = False) -> str:
    """The first line of the message of the error that :func:`is_out_of_memory` recognises."""
    found = _find(error, nearly_full) or error
    lines = str(found).strip().splitlines()
    return (lines[0] if lines else type(found).__name__)[:300]


def _find(error: BaseException | None, nearly_full: bool) -> BaseException | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return error
        if isinstance(error, RuntimeError):
            text = str(error)
            if _CERTAIN.search(text) or (nearly_full and _POSSIBLE.search(text)):
                return error
        error = error.__cause__
    return None
