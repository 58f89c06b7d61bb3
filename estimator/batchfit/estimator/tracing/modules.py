"""Which module runs: in the forward pass by hooks, in the backward pass by sequence numbers."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules import module as module_hooks


class ModuleTracker:
    """Names the module that an operator belongs to.

    Forward: global module hooks keep a stack of paths, named as ``named_modules`` names them.
    Backward: autograd numbers its nodes as the forward pass creates them; the numbers at which
    modules were entered and left tell, for a node, the module that created it.
    """

    def __init__(self) -> None:
        self.paths: list[str] = [""]
        self._index: dict[str, int] = {"": 0}
        self._names: dict[int, tuple[nn.Module, int]] = {}
        self._roots = 0
        self._stack: list[int] = [0]
        self._boundaries: list[int] = [_get_sequence_nr()]
        self._owners: list[int] = [0]
        self.current = 0
        # The innermost module that the last exception passed through. Only the exception's id: it
        # would keep the frames of a checkpoint's early stop alive, and the tensors in them.
        self._failed: tuple[int, str] = (0, "")
        #: told of each root module that is met for the first time
        self.on_root: Callable[[nn.Module], None] | None = None

    def register(self, root: nn.Module, prefix: str = "") -> None:
        """Name a module and all below it."""
        for name, module in root.named_modules():
            path = ".".join(part for part in (prefix, name) if part)
            self._names[id(module)] = (module, self._intern(path))

    def at_node(self, sequence_number: int) -> int:
        """The index of the path that created the autograd node of that number."""
        position = bisect_right(self._boundaries, sequence_number) - 1
        return self._owners[max(position, 0)]

    def index_of(self, module: nn.Module) -> int:
        """The index of a registered module's path; 0, the root, for others."""
        known = self._names.get(id(module))
        return known[1] if known is not None else 0

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow every module call of the process within the block."""
        handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _intern(self, path: str) -> int:
        index = self._index.get(path)
        if index is None:
            index = self._index[path] = len(self.paths)
            self.paths.append(path)
        return index

    def _enter(self, module: nn.Module, _args: Any) -> None:
        known = self._names.get(id(module))
        if known is None:
            # A root that nobody announced: the first is nameless, the next ones are told apart.
            prefix = f"{type(module).__name__}_{self._roots}" if self._names else ""
            self._roots += 1
            self.register(module, prefix)
            known = self._names[id(module)]
            if self.on_root is not None:
                self.on_root(module)
        self._stack.append(known[1])
        self._move(known[1])

    def failed_in(self, error: BaseException) -> str:
        """The path of the innermost module that an exception came out of."""
        return self._failed[1] if self._failed[0] == id(error) else self.paths[self.current]

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        error = sys.exc_info()[1]  # set where torch calls the hook because the module raised
        if error is not None and id(error) != self._failed[0]:
            self._failed = (id(error), self.paths[self._stack[-1]])
        del error
        if len(self._stack) > 1:
            self._stack.pop()
        self._move(self._stack[-1])

    def _move(self, index: int) -> None:
        self.current = index
        number = _get_sequence_nr()
        if self._boundaries[-1] >= number:
            # No node was made since the last boundary (or recomputation): the newer owner holds.
            self._owners[-1] = index
        else:
            self._boundaries.append(number)
            self._owners.append(index)
