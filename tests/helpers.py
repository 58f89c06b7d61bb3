"""What the tests of the core share: tracing in one line, and reading a recorded run."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from batchfit.estimator import Category, Estimate, Phase, Timeline, Workload, estimate, find_gpu
from batchfit.estimator.timeline import from_trace
from batchfit.estimator.tracing import WORKSPACES, Recorder, Trace, TraceOptions, trace
from batchfit.estimator.tracing.run import simulated_gpu

KIB, MIB, GIB = 2**10, 2**20, 2**30
A100 = "A100 80GB"


@dataclass(frozen=True)
class Storage:
    """One storage of a recorded run; ``step`` is that of its birth."""

    number: int
    operator: str
    size: int
    category: Category
    phase: Phase
    step: int
    module: str
    birth: int
    death: int | None

    def alive_at(self, position: int) -> bool:
        """Whether it is alive just before the event at ``position``."""
        return self.birth < position and (self.death is None or self.death >= position)


class Run:
    """A trace at one batch size, and questions about it."""

    def __init__(self, made: Trace) -> None:
        self.trace = made
        self.timeline: Timeline = from_trace(made)
        events = self.timeline.events.tolist()
        death = {~event: place for place, event in enumerate(events) if event < 0}
        sizes = self.timeline.fixed.tolist()
        self.storages = [
            Storage(
                number=i,
                operator=self.timeline.operators[i].removeprefix("aten::"),
                size=sizes[i],
                category=self.timeline.categories[i],
                phase=self.timeline.phases[i],
                step=self.timeline.phase_at(place)[1],
                module=self.timeline.modules[i],
                birth=place,
                death=death.get(i),
            )
            for place, i in ((place, event) for place, event in enumerate(events) if event >= 0)
        ]

    def find(self, operator: str | None = None, **want: Any) -> list[Storage]:
        """The storages of an operator, category, phase, step or module."""
        return [
            s
            for s in self.storages
            if operator in (None, s.operator)
            and all(getattr(s, key) == value for key, value in want.items())
        ]

    def sizes(self, operator: str | None = None, **want: Any) -> list[int]:
        """Requested bytes of what :meth:`find` finds, in order of birth."""
        return [s.size for s in self.find(operator, **want)]

    def start(self, phase: Phase, step: int) -> int:
        """The event at which a phase of a step begins (the first time)."""
        return next(p for p, ph, st in self.timeline.marks if (ph, st) == (phase, step))

    def alive(self, phase: Phase, step: int) -> list[Storage]:
        """What is alive when a phase of a step begins."""
        position = self.start(phase, step)
        return [s for s in self.storages if s.alive_at(position)]

    @property
    def peak(self) -> int:
        """The largest number of bytes alive, each storage rounded up to 512."""
        return self.timeline.peak(0)

    def peaks(self) -> dict[Phase, int]:
        """The same for each phase."""
        return self.timeline.phase_peaks(self.timeline.live(0))


def run(workload: Workload, batch: int = 2, gpu: str = A100, **options: Any) -> Run:
    """Trace a workload at one batch size, without library workspaces unless asked for."""
    return Run(trace(workload, batch, _options(gpu, **options)))


def _options(gpu: str, workspaces: bool = False, **options: Any) -> TraceOptions:
    return TraceOptions(find_gpu(gpu), workspaces=WORKSPACES if workspaces else (), **options)


def run_step(build: Any, batch: int = 2, gpu: str = A100, **options: Any) -> Run:
    """Trace a step function."""
    return run(Workload.from_step(build), batch, gpu, **options)


def run_code(code: Callable[[], Any], gpu: str = A100, **options: Any) -> Run:
    """Trace one call of a function that says ``device="cuda"`` itself."""

    def build(device: torch.device) -> Callable[[int], None]:
        def step(batch: int) -> None:
            code()

        return step

    return run_step(build, gpu=gpu, steps=1, **options)


@contextmanager
def gpu(name: str = A100, **options: Any) -> Iterator[Recorder]:
    """A simulated GPU to run single operators on."""
    with simulated_gpu(_options(name, **options)) as (recorder, _):
        yield recorder


def quick(workload: Any, *args: Any, **options: Any) -> Estimate:
    """An estimate on an A100 without library workspaces."""
    return estimate(workload, *args, **{"gpu": A100, "workspaces": False, **options})


def block(size: int) -> int:
    """Bytes of the block that the allocator hands out for a small request."""
    return -(-size // 512) * 512


# Every trace begins with a garbage collection, which looks at all objects that exist: most of the
# time of these tests, were not torch's own put aside here.
gc.collect()
gc.freeze()


def load_script(path: Path) -> ModuleType:
    """A script of the repository that is in no package, as a module; sys.path stays as it was."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module
