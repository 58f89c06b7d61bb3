"""What is probed: a workload, started afresh for each probe, or a function that is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfit.estimator import Workload
from batchfit.estimator.workload import Step

from .discover import discover
from .models import start_copy

__all__ = ["Job"]


class Job:
    """A step on a device.

    Args:
        work: a workload, or a function ``step(batch)`` that does one whole step on objects of the
            caller's own.
        device: where it runs.
        protect: further objects that a step changes and that must be put back.

    Attributes:
        work: as it was given.
        workload: None for a function.
        protected: what the probes put back afterwards.
    """

    def __init__(
        self, work: Workload | Callable[[int], Any], device: torch.device, protect: Sequence[Any]
    ) -> None:
        self.work = work
        self.device = device
        self.workload = work if isinstance(work, Workload) else None
        self._function = None if isinstance(work, Workload) else work
        found = discover(work.build) if isinstance(work, Workload) and work.build else []
        if self.workload is None:
            found = discover(work)
        elif self._runs_itself():
            assert isinstance(self.workload.model, nn.Module)
            found = [self.workload.model]
        self.protected: list[Any] = [*found, *protect]

    @property
    def fresh(self) -> bool:
        """Whether each probe starts from nothing (a workload), or goes on (a function)."""
        return self._function is None

    @property
    def name(self) -> str:
        """How the job is called in reports."""
        if self.workload is not None:
            return self.workload.name or "workload"
        return getattr(self._function, "__name__", type(self._function).__name__)

    def start(self) -> Step:
        """The step, ready to be called with a batch size."""
        if self._function is not None:
            return self._function
        assert self.workload is not None
        if isinstance(self.workload.model, nn.Module) and not self._runs_itself():
            return start_copy(self.workload, self.device)
        return self.workload.start(self.device)

    def existing_bytes(self) -> int:
        """Bytes on the device of the job's own tensors that exist before it starts."""
        storages = {}
        for tensor in _tensors(self.protected):
            if tensor.device.type == self.device.type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    def _runs_itself(self) -> bool:
        """Whether the user's own module is run: it is on the device and is not converted."""
        assert self.workload is not None
        model = self.workload.model
        if not isinstance(model, nn.Module):
            return False
        return all(tensor.device.type == self.device.type for tensor in model.parameters())


def _tensors(objects: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for item in objects:
        if isinstance(item, nn.Module):
            found += [*item.parameters(), *item.buffers()]
        elif isinstance(item, Optimizer):
            found += [p for group in item.param_groups for p in group["params"]]
            found += [
                value
                for state in item.state.values()
                for value in (state.values() if isinstance(state, dict) else ())
                if isinstance(value, Tensor)
            ]
        elif isinstance(item, Tensor):
            found.append(item)
    return found + [t.grad for t in found if t.is_leaf and t.grad is not None]
