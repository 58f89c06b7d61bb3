"""Run a workload once and record it: on meta as a GPU would run it, or on the CPU for real."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optim

from batchfit.estimator.cuda_rules import AttentionRules, Backend, cuda_rules
from batchfit.estimator.errors import BatchfitError, TraceError, WorkloadError
from batchfit.estimator.gpus import GPU
from batchfit.estimator.steps import refuse_lazy
from batchfit.estimator.workload import Step, Workload

from .calls import CallContext
from .devices import CudaDevices
from .ledger import Category, Ledger, Log, Phase
from .patches import patched, phases
from .plain import PlainTorch
from .recorder import Recorder
from .workspaces import WORKSPACES


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded run.

    Attributes:
        batch: the batch size it was run at.
        log: births and deaths, with what is known of each storage.
        paths: module paths by the numbers in ``log.modules``.
        model: the replica that ran, on meta, for its structure; None for a step function.
    """

    batch: int
    log: Log
    paths: list[str]
    model: nn.Module | None


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to trace.

    Attributes:
        gpu: decides kernels and workspaces.
        attention: an attention kernel to prefer over CUDA's choice.
        workspaces: which of WORKSPACES are counted.
        steps: whole steps to run; optimizer state is born in the first.
    """

    gpu: GPU
    attention: Backend | None = None
    workspaces: tuple[str, ...] = WORKSPACES
    steps: int = 2


class _Residents:
    """Finds out what the tensors of a run are for: parameters, gradients, optimizer state."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._modules: dict[int, nn.Module] = {}
        self._optimizers: dict[int, Optimizer] = {}
        # id -> (parameter, number of the module path that owns it)
        self._params: dict[int, tuple[nn.Parameter, int]] = {}

    def add_module(self, root: nn.Module) -> None:
        """Name the parameters and buffers of a module and all below it."""
        if id(root) in self._modules:
            return
        self._modules[id(root)] = root
        for module in root.modules():
            owner = self._ledger.modules.index_of(module)
            for param in module.parameters(recurse=False):
                self._params.setdefault(id(param), (param, owner))
                self._ledger.settle(param, Category.PARAMETERS, owner)
            for buffer in module.buffers(recurse=False):
                self._ledger.settle(buffer, Category.BUFFERS, owner)

    def before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Called before each optimizer step: its parameters and their gradients are known now."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            for group in optimizer.param_groups:
                for param in group["params"]:
                    self._params.setdefault(id(param), (param, 0))
                    self._ledger.settle(param, Category.PARAMETERS)
        self.gradients()
        self.after_optimizer(optimizer)  # state that the constructor has made

    def gradients(self) -> None:
        """Name the gradients that exist now."""
        for param, owner in self._params.values():
            if param.grad is not None:
                self._ledger.settle(param.grad, Category.GRADIENTS, owner)

    def after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Called after each optimizer step: name the state it made."""
        for param, state in optimizer.state.items():
            owner = self._params.get(id(param), (None, 0))[1]
            for value in state.values() if isinstance(state, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    self._ledger.settle(value, Category.OPTIMIZER_STATE, owner)

    def hook(self, stack: ExitStack) -> None:
        """Follow optimizers while the stack is open."""
        for handle in (
            optim.register_optimizer_step_pre_hook(self.before_optimizer),
            optim.register_optimizer_step_post_hook(self.after_optimizer),
        ):
            stack.callback(handle.remove)


@contextmanager
def simulated_gpu(options: TraceOptions) -> Iterator[tuple[Recorder, _Residents]]:
    """Within the block, code that says "cuda" runs on a simulated GPU, and is recorded."""
    call = CallContext(options.gpu, workspaces=options.workspaces)
    recorder = Recorder("meta", call=call)
    attention = AttentionRules(options.gpu.capability, options.attention)
    residents = _Residents(recorder.ledger)
    recorder.ledger.modules.on_root = residents.add_module
    recorder.on_backward_end = residents.gradients
    with ExitStack() as stack:
        autocast = stack.enter_context(
            cuda_rules(
                attention,
                lambda cast: recorder.ledger.settle(cast, Category.AUTOCAST_COPIES),
                recorder.follower,
            )
        )
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(patched(recorder, options.gpu, autocast.clear))
        stack.enter_context(recorder.ledger.modules.hooks())
        residents.hook(stack)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder)
        stack.enter_context(CudaDevices(recorder))
        try:
            yield recorder, residents
        finally:
            recorder.close()


def trace(workload: Workload, batch: int, options: TraceOptions) -> Trace:
    """Run the workload on meta tensors as the GPU would run it.

    Raises:
        WorkloadError: the workload cannot be run as described (wrong inputs, no loss, ...).
        TraceError: an operator cannot be traced; DataDependentError where it needs real data.
    """
    with simulated_gpu(options) as (recorder, residents):
        model = _run(workload, batch, torch.device("cuda", 0), recorder, residents, options.steps)
    return Trace(batch, recorder.ledger.log, recorder.ledger.modules.paths, model)


def record_cpu(workload: Workload, batch: int, steps: int = 2) -> Trace:
    """Run the workload for real on the CPU and record the CPU's own storages."""
    recorder = Recorder("cpu")
    residents = _Residents(recorder.ledger)
    recorder.ledger.modules.on_root = residents.add_module
    recorder.on_backward_end = residents.gradients
    with ExitStack() as stack:
        stack.enter_context(phases(recorder))
        stack.enter_context(recorder.ledger.modules.hooks())
        residents.hook(stack)
        stack.enter_context(recorder)
        model = _run(workload, batch, torch.device("cpu"), recorder, residents, steps)
    return Trace(batch, recorder.ledger.log, recorder.ledger.modules.paths, model)


def _run(
    workload: Workload, batch: int, device: torch.device, recorder: Recorder,
    residents: _Residents, steps: int,
) -> nn.Module | None:  # fmt: skip
    recorder.ledger.begin(Phase.INIT)
    replica = _replicate if device.type == "cuda" else None
    try:
        step = workload.start(device, replica=replica)
        modules = getattr(step, "modules", [])
        if getattr(step, "compiled", False):
            recorder.ledger.note(
                "the model is compiled (torch.compile); its eager step is estimated, which usually "
                "needs more"
            )
        for i, module in enumerate(modules):
            recorder.ledger.modules.register(module, "" if i == 0 else type(module).__name__)
            residents.add_module(module)
        for number in range(1, steps + 1):
            recorder.ledger.step = number
            recorder.ledger.begin(Phase.FORWARD)
            step(batch)
        residents.gradients()
        # Before the step object goes: what it holds is alive at the end of the timeline.
        recorder.close()
        return modules[0] if modules else None
    except BatchfitError:
        raise
    except SystemExit as error:
        raise WorkloadError(
            f"the code of the workload called sys.exit({error.code!r}); leave that out of it"
        ) from error
    except Exception as error:
        raise _explain(error, recorder, workload, batch) from error


_ADVICE = {
    Phase.FORWARD: "Check that the inputs have the shapes and dtypes that the model takes, also at "
    "this batch size (traced_at= names others)",
    Phase.BACKWARD: "The step would fail in training, too",
    Phase.OPTIMIZER: "If the optimizer needs a closure or other gradients, describe the step with "
    "Workload.from_step",
}


def _explain(error: Exception, recorder: Recorder, workload: Workload, batch: int) -> BatchfitError:
    """An error of ours for what user code or torch raised: what, where, what to do."""
    path = recorder.ledger.modules.failed_in(error)
    where = f" in module {path!r}" if path else ""
    text = str(error).strip().splitlines()
    first = text[0][:200].rstrip(". ") if text else ""
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    phase = recorder.failed_phase or recorder.ledger.phase
    if phase is Phase.INIT:
        return WorkloadError(f"the model could not be built: {said}")
    return TraceError(f"the {phase} pass at batch {batch} failed{where}: {said}. {_ADVICE[phase]}")


def _replicate(module: nn.Module) -> tuple[nn.Module, dict[int, nn.Parameter]]:
    """A twin of an existing module on meta: same structure, no data. The module is not touched.

    Runs within a trace. Parameters and buffers are put into deepcopy's memo, so that their data is
    never copied; other tensors that the module holds are met by the device mode.
    """
    memo: dict[int, Any] = {}
    twins: dict[int, nn.Parameter] = {}
    refuse_lazy(module)
    for _, param in module.named_parameters(remove_duplicate=False):
        if id(param) not in memo:
            twin = nn.Parameter(_like(param), requires_grad=param.requires_grad)
            memo[id(param)] = twins[id(param)] = twin
    for buffer in module.buffers():
        if id(buffer) not in memo:
            memo[id(buffer)] = _buffer_like(buffer)
    try:
        replica = copy.deepcopy(module, memo)
    except Exception as error:
        raise WorkloadError(
            f"{type(module).__name__} cannot be copied without its data ({error}); give the "
            "workload a function that makes the model instead"
        ) from error
    return replica, twins


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def _buffer_like(buffer: torch.Tensor) -> torch.Tensor:
    """Small buffers keep their values (position ids, masks); large ones only their shape."""
    if buffer.numel() <= 2**16 and buffer.layout is torch.strided:
        with PlainTorch():
            real = buffer.detach().cpu()
        return torch.as_tensor(real).clone()
    return _like(buffer)


__all__ = ["Step", "Trace", "TraceOptions", "record_cpu", "trace"]
