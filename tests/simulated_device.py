"""A simulated device for the tests of calibration: the allocator's twin, and what no timeline sees.

What the calibration is given is the timeline of a job. What the device runs is that timeline with
memory hidden in it, by mechanisms and not by the formula that the fit uses:

- kernels (as cuDNN's) have two or three algorithms, each from some batch size on; each has a
  workspace of its own, alive while the kernel runs: a fixed part, a part per sample, or nothing;
- short of memory a kernel makes do without its workspace (in half of the devices);
- a library holds blocks of its own from the start;
- some layers keep more for the backward pass than the timeline says;
- each run allocates a few small blocks at random places, and kernels that are tuned by timing
  choose otherwise now and then;
- another process holds memory that comes and goes;
- the limit is hard.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from batchfit.calibration import Probe
from batchfit.calibration.models import EstimateModel
from batchfit.estimator import Category, Estimate, Phase, Timeline, Workload, find_gpu
from batchfit.estimator.allocator import AllocatorSettings, Replay
from batchfit.estimator.allocator import replay as run_twin
from batchfit.estimator.solve import largest_safe
from batchfit.estimator.tracing import TraceOptions

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass
class Storages:
    """A timeline in the making."""

    events: list[int] = field(default_factory=list)
    fixed: list[int] = field(default_factory=list)
    slopes: list[int] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    marks: list[tuple[int, Phase, int]] = field(default_factory=list)
    phase: Phase = Phase.INIT

    def begin(self, phase: Phase, step: int) -> None:
        self.phase = phase
        self.marks.append((len(self.events), phase, step))

    def birth(self, fixed: int, slope: int = 0) -> int:
        number = len(self.fixed)
        self.events.append(number)
        self.fixed.append(fixed)
        self.slopes.append(slope)
        self.phases.append(self.phase)
        return number

    def death(self, *numbers: int) -> None:
        self.events += [~number for number in numbers]

    def timeline(self) -> Timeline:
        count = len(self.fixed)
        return Timeline(
            events=np.array(self.events, dtype=np.int64),
            fixed=np.array(self.fixed, dtype=np.int64),
            per_sample=np.array(self.slopes, dtype=np.int64),
            operators=["aten::x"] * count,
            modules=[""] * count,
            phases=self.phases,
            categories=[Category.TEMPORARIES] * count,
            marks=self.marks,
        )


def network(rng: np.random.Generator) -> Timeline:
    """A training step of a network of stages of equal layers, and the next forward pass.

    Each layer keeps two tensors for the backward pass. As in real networks most sizes are shared by
    many storages, so that the gaps that the allocator cannot use are some per cent of the peak.
    """
    made = Storages()
    weights: list[int] = []
    kept: list[int] = []
    width, area = 2 ** rng.uniform(16, 22), 2 ** rng.uniform(16, 20)
    for _ in range(int(rng.integers(1, 4))):
        count = int(rng.integers(6, 12))
        weights += [int(width)] * count
        kept += [4 * int(area / 4)] * count
        width, area = 2 * width, area / 2
    layers = len(weights)
    states = int(rng.integers(0, 3))
    made.begin(Phase.INIT, 0)
    for size in weights:
        for _ in range(1 + states):
            made.birth(size)
    wide = float(rng.choice([1.0, 2.0, 4.0]))
    last: list[int] = []
    for step in (1, 2):
        made.begin(Phase.FORWARD, step)
        stack = [(made.birth(0, kept[0] // 2),)]
        for size in kept:
            inner = made.birth(0, int(size * wide))
            scratch = made.birth(0, size)
            outer = made.birth(0, size)
            made.death(scratch)
            stack.append((inner, outer))
        made.death(*last)
        if step == 2:
            break
        made.begin(Phase.BACKWARD, step)
        gradient = made.birth(0, kept[-1])
        gradients = []
        for layer in reversed(range(layers)):
            inner = made.birth(0, int(kept[layer] * wide))
            gradients.append(made.birth(weights[layer]))
            following = made.birth(0, kept[max(layer - 1, 0)])
            made.death(gradient, inner, *(stack[layer + 1] if layer + 1 < layers else ()))
            gradient = following
        last = [gradient, *stack[0], *stack[-1]]
        made.begin(Phase.OPTIMIZER, step)
        lists = [made.birth(size) for size in weights] if states else []
        made.death(*lists, *gradients)
    return made.timeline()


def model_of(timeline: Timeline) -> EstimateModel:
    """The model that calibration has of a timeline: a real estimate, made without a trace."""

    log = SimpleNamespace(itemsizes=[4] * len(timeline.fixed), notes={})
    traced = SimpleNamespace(batch=2, log=log)
    work = Workload.from_step(lambda device: lambda batch: None, name="simulated")
    traces: Any = [traced, traced]
    options = TraceOptions(find_gpu("A100 80GB"))
    made = Estimate(work, options, timeline, traces, [], AllocatorSettings())
    made.confirm = lambda batch: True  # type: ignore[method-assign]
    return EstimateModel(made)


@dataclass(frozen=True)
class Kernel:
    """A kernel at the birth of a storage: (from this batch on, fixed bytes, bytes per sample)."""

    storage: int
    algorithms: tuple[tuple[int, int, int], ...]
    tuned: bool

    def workspace(self, batch: int, rng: np.random.Generator) -> int:
        usable = [a for a in self.algorithms if a[0] <= batch]
        chosen = usable[-1]
        if self.tuned and len(usable) > 1 and rng.random() < 0.1:
            chosen = usable[-2]
        return chosen[1] + chosen[2] * batch


def kernels_of(timeline: Timeline, rng: np.random.Generator) -> list[Kernel]:
    """Kernels for some of the storages that are born in forward and backward passes."""
    places = [
        i
        for i, phase in enumerate(timeline.phases)
        if phase in (Phase.FORWARD, Phase.BACKWARD) and timeline.per_sample[i]
    ]
    found = []
    for storage in places:
        if rng.random() > 0.4:
            continue
        algorithms = [(1, *workspace(timeline, storage, rng))]
        for _ in range(int(rng.integers(0, 3))):
            start = int(2 ** rng.uniform(1, 9))
            algorithms.append((start, *workspace(timeline, storage, rng)))
        found.append(Kernel(storage, tuple(sorted(algorithms)), bool(rng.random() < 0.3)))
    return found


def workspace(timeline: Timeline, storage: int, rng: np.random.Generator) -> tuple[int, int]:
    """Nothing (implicit GEMM), some MiB (Winograd), or in proportion to the output (FFT)."""
    kind = rng.integers(0, 3)
    if kind == 0:
        return 0, 0
    if kind == 1:
        return int(2 ** rng.uniform(20, 27)), 0
    return 0, int(timeline.per_sample[storage] * rng.uniform(0.05, 1.0))


#: What the budget of a device keeps free by default.
MARGIN = 256 * MIB


class SimulatedDevice:
    """Runs one job. See the module.

    Attributes:
        budget: bytes that the job's allocator may reserve while it is probed.
        model: what the calibration is told of the job.
    """

    def __init__(self, seed: int) -> None:
        self._rng = rng = np.random.default_rng(seed)
        line = network(rng)
        # A GPU of 2 to 24 GiB on which the largest batch is some 8 to 1000.
        self.budget = int(GIB * 2 ** rng.uniform(1, 4.6))
        wanted = 2 ** rng.uniform(3, 10)
        fixed, slope = int(line.fixed.sum()), line.peak(1001) - line.peak(1)
        scale = 0.9 * self.budget / (fixed + slope / 1000 * wanted)
        self._timeline = replace(
            line,
            fixed=(line.fixed * scale).astype(np.int64),
            per_sample=4 * (line.per_sample * scale / 4).astype(np.int64),
        )
        self.model = model_of(self._timeline)
        # Nothing, a little or much is hidden: most real jobs are exact, some are not at all.
        self._kernels = kernels_of(self._timeline, rng) if rng.random() < 0.6 else []
        self._library = [int(2 ** rng.uniform(12, 27)) for _ in range(int(rng.integers(0, 4)))]
        self._more = np.ones(len(self._timeline.fixed))
        if rng.random() < 0.3:
            for i, phase in enumerate(self._timeline.phases):
                if phase is Phase.FORWARD and rng.random() < 0.2:
                    self._more[i] = rng.uniform(1.0, 1.3)
        self._frugal = bool(rng.random() < 0.5)
        self._small = int(rng.integers(0, 6))
        self._alpha, self._beta = 2 ** rng.uniform(-8, -4), 2 ** rng.uniform(-14, -8)

    def later(self) -> int:
        """What the job can have some other day: another process takes up to half the margin."""
        return self.budget + MARGIN - int(self._rng.integers(0, MARGIN // 2))

    def run(self, batch: int, limit: int | None = None, quiet: bool = False) -> Probe:
        """One measured run; ``quiet`` leaves out what changes from run to run."""
        limit = self.budget if limit is None else limit
        rng = np.random.default_rng(0) if quiet else self._rng
        done = self.replay(batch, limit, rng, quiet)
        if done.oom is not None:
            return Probe(batch, 0, None, 0.0, 0.0, 1, "simulated out of memory", limit)
        seconds = (self._alpha + self._beta * batch) * float(np.exp(rng.normal(0, 0.01)))
        return Probe(
            batch, done.peak_allocated, done.peak_reserved, seconds, 0.01 * seconds, 5, None, limit,
            retries=done.retries,
        )  # fmt: skip

    def replay(
        self, batch: int, limit: int | None, rng: np.random.Generator, quiet: bool = False
    ) -> Replay:
        """The real run on the twin of the allocator."""
        line = self._timeline
        sizes = (line.fixed + line.per_sample * batch * self._more).astype(np.int64).tolist()
        events: list[int] = []
        optional: set[int] = set()

        def new(size: int) -> int:
            sizes.append(size)
            return len(sizes) - 1

        for size in self._library:
            events.append(new(size))
        kernels = {kernel.storage: kernel for kernel in self._kernels}
        noisy = set() if quiet else set(rng.integers(0, len(line.events), self._small).tolist())
        for place, event in enumerate(line.events.tolist()):
            if place in noisy:  # lives until the end: at most a few KiB
                events.append(new(int(rng.integers(1, 16 * KIB))))
            scratch = kernels[event].workspace(batch, rng) if event in kernels else 0
            if scratch:
                number = new(scratch)
                if self._frugal:
                    optional.add(number)
                events += [event, number, ~number]
            else:
                events.append(event)
        return run_twin(events, sizes, budget=limit, optional=optional)

    def largest(self) -> int:
        """The largest batch that runs together with all smaller ones, without noise."""
        return largest_safe(lambda b: self.run(b, quiet=True).ran, lambda n: n, 2**20)[0]
