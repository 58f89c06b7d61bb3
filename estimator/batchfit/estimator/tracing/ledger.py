"""The ledger of a run: which storages were born and died, and what is known of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .modules import ModuleTracker
from .workspaces import SizeRule


class Category(str, Enum):
    """What a storage is for. Activations are what is alive at the end of the forward pass."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    AUTOCAST_COPIES = "autocast copies"
    TEMPORARIES = "temporaries"
    WORKSPACE = "workspace"

    def __str__(self) -> str:
        return self.value


class Phase(str, Enum):
    """Where in a step something happens."""

    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    def __str__(self) -> str:
        return self.value


@dataclass(slots=True)
class Log:
    """Everything recorded, in columns. Storage i has ``sizes[i]`` bytes, and so on.

    ``itemsizes`` holds the bytes of an element, and 0 for a buffer that is no tensor's.

    ``events`` holds i for the birth of storage i and ~i (negative) for its death; ``marks`` the
    position in ``events`` at which each phase began; ``rules`` the formula, and the numbers it was
    asked with, of storages whose size has one; ``optional`` the storages that a library does
    without where memory is short.
    """

    sizes: list[int] = field(default_factory=list)
    itemsizes: list[int] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    modules: list[int] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    categories: list[Category | None] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, Phase, int]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    rules: dict[int, tuple[SizeRule, tuple[int, ...]]] = field(default_factory=dict)
    optional: set[int] = field(default_factory=set)


class Ledger:
    """Writes births and deaths down as they happen, by watching storages.

    On meta a storage is either on the simulated GPU, and recorded, or on the host, and only known.

    Attributes:
        log: what is recorded.
        modules: tells which module is running.
        phase, step: where in the run it is.
        on_death: told the key of each storage that dies.
    """

    def __init__(self) -> None:
        self.log = Log()
        self.modules = ModuleTracker()
        self.phase = Phase.INIT
        self.step = 0
        self.on_death: Callable[[int], None] | None = None
        # storage key -> (weak reference whose callback records the death, number or -1 for host)
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._closed = False

    def on_device(self, tensor: Tensor) -> bool:
        """Whether a meta tensor stands for one on the GPU (and not on the host)."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return entry is None or entry[1] >= 0

    def index_of(self, tensor: Tensor) -> int | None:
        """The storage number of a recorded tensor."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry is not None and entry[1] >= 0 else None

    def begin(self, phase: Phase) -> None:
        """From here on storages belong to this phase."""
        self.phase = phase
        self.log.marks.append((len(self.log.events), phase, self.step))

    def settle(self, tensor: Tensor, category: Category, module: int | None = None) -> None:
        """Say what a recorded tensor is for and whose it is; the first word holds."""
        index = self.index_of(tensor)
        if index is None or self.log.categories[index] is not None:
            return
        self.log.categories[index] = category
        if module is not None:
            self.log.modules[index] = module

    def transient(self, size: int, operator: str, category: Category | None = None) -> int:
        """Record a birth that no tensor stands for; returns its number for :meth:`release`."""
        return self._append(size, 0, operator, category)

    def transient_by_rule(self, rule: SizeRule, numbers: tuple[int, ...], operator: str) -> int:
        """A :meth:`transient` whose size a rule gives; it may be 0 at this batch size."""
        index = self._append(rule(numbers), 0, operator, Category.WORKSPACE)
        self.log.rules[index] = (rule, numbers)
        return index

    def optional(self, size: int, operator: str) -> None:
        """Record the birth and death of a buffer that a library does without if it must."""
        index = self._append(size, 0, operator, Category.WORKSPACE)
        self.log.optional.add(index)
        self.release(index)

    def release(self, index: int) -> None:
        """Record the death of a :meth:`transient`."""
        self.log.events.append(~index)

    def note(self, text: str) -> None:
        """Something the reader of the estimate should know; counted, said once."""
        self.log.notes[text] = self.log.notes.get(text, 0) + 1

    def close(self) -> None:
        """Stop recording deaths: what is alive now is alive at the end of the timeline."""
        self._closed = True
        self._alive.clear()

    def register(
        self, tensor: Tensor, operator: str, on_device: bool, opaque: bool = False
    ) -> None:
        """Record the birth of a tensor's storage, if it is a new one.

        Args:
            tensor: of the storage.
            operator: that made it.
            on_device: on the GPU, not on the host.
            opaque: a library's own buffer: its bytes are not elements that kernels index.
        """
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        index = -1
        if on_device:
            itemsize = 0 if opaque else tensor.element_size()
            index = self._append(storage.nbytes(), itemsize, operator, None)
        self._watch(storage, index)

    def _append(self, size: int, itemsize: int, operator: str, category: Category | None) -> int:
        log = self.log
        index = len(log.sizes)
        log.sizes.append(size)
        log.itemsizes.append(itemsize)
        log.operators.append(operator)
        log.modules.append(self._module())
        log.phases.append(self.phase)
        log.categories.append(category)
        log.events.append(index)
        return index

    def _module(self) -> int:
        if self.phase is Phase.BACKWARD:
            node = torch._C._current_autograd_node()
            if node is not None and self.modules.current == 0:
                return self.modules.at_node(node._sequence_nr())
        return self.modules.current

    def _watch(self, storage: Any, index: int) -> None:
        key = storage._cdata

        def dies(_: Any, key: int = key, index: int = index) -> None:
            if self._closed:
                return
            self._alive.pop(key, None)
            if self.on_death is not None:
                self.on_death(key)
            if index >= 0:
                self.log.events.append(~index)

        self._alive[key] = (weakref.ref(storage, dies), index)
