"""torchinfo's sums: cheap, rough, and shown beside the traced figures.

torchinfo adds up the outputs of leaf modules that own parameters. It cannot see functional
operators (attention, residual sums, activations called as functions), what autograd saves, kernel
temporaries, the optimizer, or the allocator; and it counts every output twice ("for gradients").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torchinfo
from torch import nn

from .errors import BatchfitError, TraceError
from .tracing import TraceOptions
from .tracing.run import simulated_gpu
from .workload import Workload

#: What torchinfo's total leaves out, for reports.
BLIND_SPOTS = (
    "functional operators (attention scores, residual sums)",
    "tensors saved for backward that are not a layer's output",
    "gradients' and kernels' temporaries, optimizer state, rounding and fragmentation",
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One row of the layer tree.

    Attributes:
        path: name as ``named_modules`` gives it.
        kind: class name.
        depth: 0 for the model.
        parameters: number of parameters below this row (tied ones counted where torchinfo does).
        output_bytes_per_sample: bytes of the layer's output for one sample.
    """

    path: str
    kind: str
    depth: int
    parameters: int
    output_bytes_per_sample: int


@dataclass(frozen=True, slots=True)
class LayerSums:
    """The four sums, in bytes, and the layer tree.

    Attributes:
        parameters: of all parameters, tied weights once.
        gradients: of the trainable ones.
        optimizer_state: what the optimizer keeps after its first step (from the trace).
        activations_per_sample: outputs of leaf layers with parameters, once, for one sample.
        layers: the tree, in order of first call.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations_per_sample: int
    layers: tuple[Layer, ...]

    def torchinfo_total(self, batch: int) -> int:
        """torchinfo's "Estimated Total Size" without the input: parameters and doubled outputs."""
        return self.parameters + 2 * self.activations_per_sample * batch


def layer_sums(
    workload: Workload, options: TraceOptions, optimizer_state: int, batch: int
) -> LayerSums | None:
    """Run torchinfo on the workload's model; None for a step function, which has no one model.

    Raises:
        TraceError: torchinfo could not run the model.
    """
    if workload.build is not None:
        return None
    from .tracing.run import _replicate

    with simulated_gpu(options):
        step: Any = workload.start(torch.device("cuda", 0), replica=_replicate)
        model: nn.Module = step.modules[0]
        parameters = {id(p): p for p in model.parameters()}.values()
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in parameters]
        try:
            tree = _tree(model, step.example(batch), batch)
        except BatchfitError:
            raise
        except Exception as error:
            raise TraceError(f"torchinfo could not run the model: {error}") from error
    outputs = sum(layer.output_bytes_per_sample for layer, counted in tree if counted)
    return LayerSums(
        parameters=sum(size for size, _ in sizes),
        gradients=0 if workload.inference else sum(size for size, grad in sizes if grad),
        optimizer_state=optimizer_state,
        activations_per_sample=outputs,
        layers=tuple(layer for layer, _ in tree),
    )


def _tree(model: nn.Module, inputs: Any, batch: int) -> list[tuple[Layer, bool]]:
    """torchinfo's rows, each with whether its output counts (a leaf with parameters)."""
    names = {id(module): name for name, module in model.named_modules()}
    data: dict[str, Any] = {"input_data": inputs}
    if isinstance(inputs, Mapping):
        data = {"input_data": dict(inputs)}
    elif isinstance(inputs, tuple):
        data = {"input_data": list(inputs)}
    statistics = torchinfo.summary(
        model, **data, depth=100, verbose=0, col_names=("num_params",), cache_forward_pass=False,
        device=torch.device("cuda", 0), mode="eval" if not model.training else "train",
    )  # fmt: skip
    rows = []
    for info in statistics.summary_list:
        layer = Layer(
            path=names.get(info.layer_id, info.var_name),
            kind=info.class_name,
            depth=info.depth,
            parameters=max(info.num_params, 0),
            output_bytes_per_sample=info.output_bytes // batch,
        )
        rows.append((layer, info.is_leaf_layer and info.num_params > 0))
    return rows
