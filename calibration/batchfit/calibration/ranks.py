"""Several processes that calibrate together, under torch.distributed.

Every rank probes the same batch sizes in step. What one of them sees, all know: after each probe
the ranks exchange what became of it, so that nobody waits for one that has failed.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist

from .errors import CalibrationError

__all__ = ["Alone", "Group", "Ranks", "find_ranks"]


class Ranks(Protocol):
    """The processes that take part.

    Attributes:
        size: how many.
    """

    size: int

    def smallest(self, value: int) -> int:
        """The smallest of the values that the ranks give."""

    def any(self, value: bool, error: BaseException | None = None) -> bool:
        """Whether any rank says yes. If one gives an error, every rank raises."""


class Alone:
    """One process. See :class:`Ranks`."""

    size = 1

    def smallest(self, value: int) -> int:
        return value

    def any(self, value: bool, error: BaseException | None = None) -> bool:
        if error is not None:
            raise error
        return value


class Group:
    """The ranks of a process group. See :class:`Ranks`.

    Args:
        group: None takes the default group. Objects travel through it, so that any backend does
            (NCCL copies them through the GPU: some kilobytes of its memory).
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def smallest(self, value: int) -> int:
        return int(min(self._gather(value)))

    def any(self, value: bool, error: BaseException | None = None) -> bool:
        said = self._gather((value, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(said):
            if text is not None:
                raise CalibrationError(f"rank {rank} failed: {text}")
        return any(yes for yes, _ in said)

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found


def find_ranks() -> Ranks:
    """The ranks of this run: those of torch.distributed where it is in use, else this process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Group()
    return Alone()
