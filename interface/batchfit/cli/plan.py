"""What is asked of ``batchfit estimate``, checked before anything slow is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchfit.estimator import GPU, Budget, find_gpu
from batchfit.estimator.allocator import AllocatorSettings
from batchfit.estimator.answer import traced_batches
from batchfit.estimator.budget import explicit_budget, gpu_budget
from batchfit.estimator.solve import candidates, check_batch

#: Whose kernels and memory are meant where the user names no GPU.
DEFAULT_GPU = "A100 80GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The question.

    Attributes:
        batches: sizes to report on; empty where the user named none.
        gpus: one per column, with the budget of each in ``budgets``.
        named: whether the user named the GPUs.
        asked: whether the user named a GPU or a budget, so that "does it fit" has an answer.
        power_of_two, multiple_of, max_batch: which answers the user would take.
        attention: the attention kernel to prefer.
        allocator: the settings of PyTorch's allocator.
        settings: what the user wrote of them; may be empty.
        layers: show the layer tree and the module table.
    """

    batches: tuple[int, ...]
    gpus: tuple[GPU, ...]
    budgets: tuple[Budget, ...]
    named: bool
    asked: bool
    power_of_two: bool
    multiple_of: int
    max_batch: int | None
    attention: Any
    allocator: AllocatorSettings
    settings: str
    layers: bool

    @property
    def smallest(self) -> int:
        """The smallest batch size that the user would take."""
        return candidates(self.multiple_of, self.power_of_two)(1)

    @property
    def traced_at(self) -> tuple[int, int]:
        """Two batch sizes to trace: multiples, for code that takes only those."""
        return traced_batches(self.multiple_of)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Plan:
        """The plan of the options given.

        Raises:
            BatchfitError: a batch size below 1, an unknown GPU, a budget nobody can have, ...
        """
        allocator = allocator_settings(given)
        found = {gpu.name: gpu for gpu in map(find_gpu, given.get("gpu", ()))}
        gpus = tuple(found.values()) or (find_gpu(DEFAULT_GPU),)
        plan = cls(
            batches=tuple(sorted({check_batch(batch) for batch in given.get("batch", ())})),
            gpus=gpus,
            budgets=tuple(_budget(gpu, given, allocator) for gpu in gpus),
            named="gpu" in given,
            asked="gpu" in given or "budget" in given,
            power_of_two="power_of_two" in given,
            multiple_of=given.get("multiple_of", 1),
            max_batch=check_batch(given["max_batch"]) if "max_batch" in given else None,
            attention=given.get("attention"),
            allocator=allocator,
            settings=given.get("allocator", ""),
            layers="layers" in given,
        )
        candidates(plan.multiple_of, plan.power_of_two)
        return plan


def allocator_settings(given: dict[str, Any]) -> AllocatorSettings:
    """Those of ``--allocator``, else the environment's.

    Raises:
        WorkloadError: settings that PyTorch refuses.
    """
    if "allocator" in given:
        return AllocatorSettings.parse(given["allocator"])
    return AllocatorSettings.from_environment()


def _budget(gpu: GPU, given: dict[str, Any], allocator: AllocatorSettings) -> Budget:
    if "budget" in given:
        budget = explicit_budget(given["budget"], gpu)
    else:
        budget = gpu_budget(gpu, given["margin"]) if "margin" in given else gpu_budget(gpu)
    # per_process_memory_fraction is a budget of its own, for what the allocator reserves.
    share = int(gpu.total_bytes * allocator.memory_fraction)
    if allocator.memory_fraction < 1 and share < budget.bytes:
        return explicit_budget(share, gpu)
    return budget
