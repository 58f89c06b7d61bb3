"""What ``torch.cuda`` and the optimizers answer during a trace; undone when it ends.

A trace must take the paths that the code takes on the GPU: ``torch.cuda.is_available()`` is true,
autocast and GradScaler are on, optimizers see a device that has foreach and fused kernels. Every
change is made to a module attribute and restored on exit, also after an exception.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.optim.swa_utils
import torch.utils._foreach_utils
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from batchfit.estimator.gpus import GPU

from .ledger import Phase
from .loading import one_process
from .plain import PlainTorch
from .recorder import Recorder


class _Patches:
    """Attributes replaced, and what they were."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)


class _Idle:
    """A stream, event or graph that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = synchronize = wait_event = wait_stream = record_event = _nothing

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _HostGenerator(torch.Generator):
    """``torch.Generator(device="cuda")`` without a GPU: any device means the host."""

    def __new__(cls, device: Any = "cpu") -> _HostGenerator:
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]


def _patch_load(patches: _Patches, recorder: Recorder) -> None:
    """``torch.load`` reads real tensors; their twins on meta are given, the data is let go."""
    original = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        kwargs["map_location"] = "cpu"
        if len(args) > 1:
            args = (args[0], *args[2:])
        with PlainTorch():
            loaded = original(*args, **kwargs)
            return tree_map_only(
                torch.Tensor, lambda real: recorder.follower.lift(real, remember=False), loaded
            )

    patches.set(torch, "load", load)


def _patch_foreach(patches: _Patches) -> None:
    """C++ groups tensors by their true device, meta; it has foreach kernels here."""
    original = torch.utils._foreach_utils._get_foreach_kernels_supported_devices

    def devices() -> list[str]:
        return [*original(), "meta"]

    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.optim.swa_utils"):
        module = sys.modules[name]  # torch.optim hides the module of that name
        patches.set(module, "_get_foreach_kernels_supported_devices", devices)


def _properties(gpu: GPU) -> SimpleNamespace:
    return SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1],
        total_memory=gpu.total_bytes, multi_processor_count=gpu.sm_count,
        max_threads_per_multi_processor=gpu.threads_per_sm, warp_size=32, gcnArchName=gpu.arch,
        is_integrated=False, is_multi_gpu_board=False,
    )  # fmt: skip


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _patch_cuda(patches: _Patches, gpu: GPU, recorder: Recorder) -> None:
    cuda = torch.cuda
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_capability": gpu.capability, "get_device_name": gpu.name,
        "get_device_properties": _properties(gpu), "mem_get_info": (gpu.total_bytes,) * 2,
        "is_bf16_supported": gpu.capability >= (8, 0), "synchronize": None, "empty_cache": None,
        "reset_peak_memory_stats": None, "set_device": None, "init": None, "_lazy_init": None,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
        "max_memory_reserved": 0, "manual_seed": None, "manual_seed_all": None,
        "current_stream": _Idle(), "default_stream": _Idle(), "stream": _Idle(),
        "get_rng_state": torch.empty(16, dtype=torch.uint8), "set_rng_state": None,
        "get_rng_state_all": [], "set_rng_state_all": None, "ipc_collect": None,
        "is_current_stream_capturing": False, "memory_stats": defaultdict(int),
        "memory_summary": "", "memory_snapshot": [],
    }  # fmt: skip
    for name, value in answers.items():
        patches.set(cuda, name, _constant(value))
    accelerator = torch.accelerator
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 0,
        "current_stream": _Idle(),
        "synchronize": None,
        "empty_cache": None,
    }.items():
        if hasattr(accelerator, name):
            patches.set(accelerator, name, _constant(value))
    for name in ("Stream", "Event", "device"):
        patches.set(cuda, name, _Idle)
    patches.set(torch, "Generator", _HostGenerator)
    patches.set(torch.utils.checkpoint, "get_device_states", _constant(([], [])))
    patches.set(torch.utils.checkpoint, "set_device_states", _constant(None))
    patches.set(torch.cuda.amp.common, "amp_definitely_not_available", _constant(False))
    cudnn = torch.backends.cudnn
    patches.set(cudnn, "is_available", _constant(True))
    patches.set(cudnn, "version", _constant(91900))
    # The RNN modules flatten their weights where cuDNN would run; the simulated kernel takes the
    # parameters as they are, so they stay separate (the same bytes).
    patches.set(cudnn, "is_acceptable", _constant(False))


def _patch_autocast(patches: _Patches, clear: Callable[[], None]) -> None:
    original = torch.clear_autocast_cache

    def clear_cache() -> None:
        clear()
        original()

    patches.set(torch, "clear_autocast_cache", clear_cache)


def _patch_phases(patches: _Patches, recorder: Recorder) -> None:
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        outer = recorder.ledger.phase
        if outer is Phase.BACKWARD:
            return engine(*args, **kwargs)
        recorder.ledger.begin(Phase.BACKWARD)
        try:
            return engine(*args, **kwargs)
        except Exception:
            recorder.failed_phase = Phase.BACKWARD
            raise
        finally:
            if recorder.on_backward_end is not None:
                recorder.on_backward_end()
            recorder.ledger.begin(outer)

    recorder.engine_caller = run_backward.__code__
    patches.set(torch.autograd, "_engine_run_backward", run_backward)


@contextmanager
def _real_tensors_kept(recorder: Recorder) -> Iterator[None]:
    """A module that exists outside the trace is moved through twins, and gets its tensors back.

    ``Module.to`` replaces the data of parameters in place; a global module that a factory returns
    would be left empty by it. Its parameters are exchanged for twins first, tied ones for one twin.
    """
    original: Any = nn.Module._apply
    twins: dict[int, nn.Parameter] = {}
    taken: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for name, param in self._parameters.items():
            if param is not None and not param.is_meta:
                taken.append((self._parameters, name, param))
                if id(param) not in twins:
                    twin = recorder.follower.lift(param.detach(), remember=False)
                    twins[id(param)] = nn.Parameter(twin, requires_grad=param.requires_grad)
                self._parameters[name] = twins[id(param)]
        for name, buffer in self._buffers.items():
            if buffer is not None and not buffer.is_meta:
                taken.append((self._buffers, name, buffer))
        moved: nn.Module = original(self, *args, **kwargs)
        return moved

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
        for tensors, name, tensor in reversed(taken):
            tensors[name] = tensor


@contextmanager
def phases(recorder: Recorder) -> Iterator[None]:
    """Within the block the recorder is told when backward passes and optimizer steps begin."""
    patches = _Patches()
    try:
        _patch_phases(patches, recorder)
        with _optimizer_phase(recorder):
            yield
    finally:
        patches.undo()


@contextmanager
def _optimizer_phase(recorder: Recorder) -> Iterator[None]:
    from torch.optim import optimizer as optim

    outer: list[Phase] = []

    def before(*args: Any) -> None:
        outer.append(recorder.ledger.phase)
        recorder.ledger.begin(Phase.OPTIMIZER)

    def after(*args: Any) -> None:
        recorder.ledger.begin(outer.pop() if outer else Phase.FORWARD)

    handles = [
        optim.register_optimizer_step_pre_hook(before),
        optim.register_optimizer_step_post_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _private_random(seed: int) -> Iterator[None]:
    """Both traces must take the same turns: seed random and numpy, give all back after."""
    state, np_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(np_state)
        torch.set_rng_state(torch_state)


@contextmanager
def _no_cycle_collection() -> Iterator[None]:
    """Deaths must follow from the program, not from when the cycle collector happens to run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def patched(recorder: Recorder, gpu: GPU, clear_autocast: Callable[[], None]) -> Iterator[None]:
    """Everything above, for the length of the block."""
    patches = _Patches()
    try:
        _patch_cuda(patches, gpu, recorder)
        _patch_autocast(patches, clear_autocast)
        _patch_load(patches, recorder)
        _patch_foreach(patches)
        patches.set(DataLoader, "_get_iterator", one_process)
        with (
            phases(recorder),
            _real_tensors_kept(recorder),
            _private_random(0),
            _no_cycle_collection(),
        ):
            yield
    finally:
        patches.undo()
