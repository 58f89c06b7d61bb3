"""Out of memory in every form it comes in, and everything that only looks like it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from batchfit.calibration import find_meter, is_out_of_memory
from batchfit.calibration.job import Job
from batchfit.calibration.oom import out_of_memory_text
from batchfit.calibration.probes import ProbeOptions, run_probe

MESSAGES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity; ...",
    "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 63.98 GiB",
    "XPU out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.00 GiB total capacity; ...",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED when calling hipblasCreate(handle)",
    "miopenStatusAllocFailed",
    "MPS backend out of memory (MPS allocated: 8.02 GB, other allocations: 1.02 GB, max allowed: "
    "9.07 GB). Tried to allocate 256.00 MB on private pool.",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":995',
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "NCCL Error: Failed to CUDA malloc 4194304 bytes",
]
AMBIGUOUS = [
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
]
OTHERS = [
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "Expected all tensors to be on the same device",
    "CUDA error: device-side assert triggered",
    "element 0 of tensors does not require grad and does not have a grad_fn",
    "the memory format of the input is not supported",
]


@pytest.mark.parametrize("text", MESSAGES)
def test_every_wording_is_recognised(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert out_of_memory_text(RuntimeError(text)) == text.splitlines()[0][:300]


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_ambiguous_wordings_count_only_on_a_full_device(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(RuntimeError(text), nearly_full=True)


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_are_never_taken_for_it(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text), nearly_full=True)


def test_types_and_causes() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("x"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("CUDA out of memory"))
    assert not is_out_of_memory(KeyboardInterrupt())
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(wrapped) and out_of_memory_text(wrapped) == "CUDA out of memory."
    handling = RuntimeError("another fault while that was handled")
    handling.__context__ = torch.OutOfMemoryError("x")
    assert not is_out_of_memory(handling)


def test_a_real_one_is_survived_and_its_memory_given_back() -> None:
    """The frames of the exception hold the step's tensors; they must go."""
    held: list[weakref.ref[torch.Tensor]] = []

    def step(batch: int) -> None:
        kept = torch.zeros(1000)
        held.append(weakref.ref(kept))
        torch.empty(2**60, dtype=torch.uint8)
        kept.sum()

    meter = find_meter("cpu")
    probe = run_probe(Job(step, meter.device, ()), meter, 4, 1, ProbeOptions())
    gc.collect()
    assert not probe.ran and "alloc" in (probe.out_of_memory or "").lower()
    assert held and held[0]() is None
