"""How many bytes the allocator may reserve on a GPU: total - context - margin."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import BudgetError
from .gpus import GPU
from .units import MIB, format_bytes, parse_bytes

#: Kept free by default: what a first driver call, another library or a small display may take.
DEFAULT_MARGIN = 256 * MIB


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget and where it comes from. All in bytes.

    Attributes:
        total: of the GPU, as torch reports it; for an explicit budget, that budget.
        context: held outside PyTorch's allocator (CUDA context, kernels, libraries).
        margin: kept free.
        bytes: what is left for the allocator.
    """

    total: int
    context: int = 0
    margin: int = 0

    @property
    def bytes(self) -> int:
        """What the allocator may reserve."""
        return self.total - self.context - self.margin

    def __str__(self) -> str:
        if not self.context and not self.margin:
            return format_bytes(self.total)
        return (
            f"{format_bytes(self.bytes)} = {format_bytes(self.total)} total - "
            f"{format_bytes(self.context)} context - {format_bytes(self.margin)} margin"
        )


def gpu_budget(gpu: GPU, margin: int | str = DEFAULT_MARGIN) -> Budget:
    """The budget of a GPU that nobody else uses.

    Raises:
        BudgetError: the margin leaves nothing.
    """
    budget = Budget(gpu.total_bytes, gpu.context_bytes, parse_bytes(margin))
    if budget.bytes <= 0:
        raise BudgetError(
            f"a margin of {format_bytes(budget.margin)} leaves nothing of the {gpu.name}'s "
            f"{format_bytes(gpu.total_bytes)} (context {format_bytes(gpu.context_bytes)}); make it "
            "smaller"
        )
    return budget


def explicit_budget(size: int | str, gpu: GPU) -> Budget:
    """A budget given by the user: the bytes that the allocator may reserve, nothing subtracted.

    Raises:
        BudgetError: unreadable, zero, or smaller than the GPU's context, which is likely a mistake
            in the unit.
    """
    budget = Budget(parse_bytes(size))
    if budget.bytes < gpu.context_bytes:
        raise BudgetError(
            f"a budget of {format_bytes(budget.bytes)} is less than the "
            f"{format_bytes(gpu.context_bytes)} that a CUDA context alone takes on a {gpu.name}; "
            "give what PyTorch may use, as 22GiB"
        )
    return budget
