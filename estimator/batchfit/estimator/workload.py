"""What is trained: one object that is traced without a GPU and run on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .errors import WorkloadError
from .losses import LOSSES
from .optimizers import OptimizerSpec, parse_optimizer
from .steps import StandardStep

#: precision -> (dtype of weights and inputs, autocast dtype, GradScaler)
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None, bool]] = {
    "fp32": (torch.float32, None, False),
    "tf32": (torch.float32, None, False),
    "amp-fp16": (torch.float32, torch.float16, True),
    "amp-bf16": (torch.float32, torch.bfloat16, False),
    "bf16": (torch.bfloat16, None, False),
    "fp16": (torch.float16, None, False),
}
MEMORY_FORMATS: dict[str, torch.memory_format] = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
}

Step = Callable[[int], Any]
Build = Callable[[torch.device], Step]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training (or inference) step of any batch size.

    Attributes:
        model: a function that makes the model, or a module that exists, with data, on any device
            (nothing of it is copied or changed by a trace).
        inputs: a function of the batch size, or an example whose dimension ``batch_dim`` is the
            batch. A tensor is passed as ``model(x)``, a tuple or list as ``model(*x)``, a mapping
            as ``model(**x)``; they may be nested.
        loss: a name (``cross_entropy``, ``mse``, ``l1``, ``smooth_l1``, ``bce_with_logits``,
            ``sum``, ``mean``, ``model``), a criterion of torch such as ``nn.CrossEntropyLoss()``,
            or a callable on (outputs, inputs). None takes the loss
            that the model returns, else cross-entropy on its logits.
        targets: a function of the batch size for the target of a named loss; None makes one of the
            shape that the outputs ask for.
        optimizer: a name such as ``adamw`` or ``sgd:momentum=0``, a class, ``(class, arguments)``,
            a factory of parameters, an existing optimizer, or None for none.
        precision: ``fp32``, ``tf32``, ``amp-fp16`` (with GradScaler), ``amp-bf16``, ``bf16``,
            ``fp16``.
        memory_format: ``contiguous`` or ``channels_last``.
        checkpointing: switch on the model's own gradient checkpointing.
        accumulate: micro-batches per optimizer step; ``batch`` is the micro-batch.
        set_to_none: as in ``optimizer.zero_grad``.
        clip_grad_norm: maximum norm for ``clip_grad_norm_``, or None.
        ema: keep an exponential moving average of the weights on the device.
        evaluate: an evaluation pass of the same batch size follows each step.
        inference: no training: evaluation mode, no gradients.
        keep_outputs: the outputs of a step stay alive until the next forward pass has made new
            ones, as names in a plain loop do; False for a trainer that keeps only the loss
            (Hugging Face's).
        batch_dim: which dimension of example inputs is the batch.
        build: the general form, see :meth:`from_step`; excludes everything else.
        name: how the workload is called in reports.
    """

    model: nn.Module | Callable[[], nn.Module] | None = None
    inputs: Any = None
    loss: str | Callable[[Any, Any], Tensor] | None = None
    targets: Callable[[int], Any] | None = None
    optimizer: OptimizerSpec = "adamw"
    precision: str = "fp32"
    memory_format: str = "contiguous"
    checkpointing: bool = False
    accumulate: int = 1
    set_to_none: bool = True
    clip_grad_norm: float | None = None
    ema: bool = False
    evaluate: bool = False
    inference: bool = False
    keep_outputs: bool = True
    batch_dim: int = 0
    build: Build | None = field(default=None, repr=False)
    name: str = ""

    def __post_init__(self) -> None:
        if self.build is not None:
            if self.model is not None or self.inputs is not None:
                raise WorkloadError(
                    "a workload from a step function has no model or inputs of its own"
                )
            return
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            raise WorkloadError(
                f"model must be a module or a function that makes one, found {self.model!r}"
            )
        if self.inputs is None:
            raise WorkloadError(
                "inputs are missing; give a function of the batch size, for example "
                "lambda b: torch.empty(b, 3, 224, 224), or an example batch"
            )
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("memory_format", self.memory_format, MEMORY_FORMATS)
        if isinstance(self.loss, str):
            _one_of("loss", self.loss, LOSSES)
        if isinstance(self.optimizer, str):
            parse_optimizer(self.optimizer)
        if self.clip_grad_norm is not None and not 0 < self.clip_grad_norm < float("inf"):
            raise WorkloadError(
                f"clip_grad_norm must be a positive number, found {self.clip_grad_norm!r}"
            )
        if not callable(self.inputs):
            _check_batch_dim(self.inputs, self.batch_dim)
        whole = isinstance(self.accumulate, int) and not isinstance(self.accumulate, bool)
        if not whole or self.accumulate < 1:
            raise WorkloadError(
                f"accumulate must be a whole number of micro-batches, found {self.accumulate!r}"
            )

    @classmethod
    def from_step(cls, build: Build, *, name: str = "") -> Workload:
        """The general form, for anything: several optimizers, GANs, custom loops.

        Args:
            build: called once with a device; makes models, optimizers and whatever else on it and
                returns ``step``, which is called with a batch size and does one whole step.

        >>> def build(device):
        ...     model = nn.Linear(8, 8).to(device)
        ...     def step(batch):
        ...         model(torch.randn(batch, 8, device=device)).sum().backward()
        ...         model.zero_grad()
        ...     return step
        >>> Workload.from_step(build, name="a custom loop").name
        'a custom loop'
        """
        return cls(build=build, name=name)

    def with_(self, **changes: Any) -> Workload:
        """A copy with some attributes changed."""
        return replace(self, **changes)

    def start(
        self,
        device: torch.device,
        *,
        replica: Callable[[nn.Module], tuple[nn.Module, Mapping[int, nn.Parameter]]] | None = None,
    ) -> Step:
        """Make everything on a device and return ``step(batch)``.

        Args:
            device: where the step runs.
            replica: for a model that exists already, how to get the one to run, with a map from the
                ids of its parameters to those of the copy; None runs the model itself.
        """
        if self.build is not None:
            step = self.build(device)
            if not callable(step):
                raise WorkloadError(
                    f"the build function returned {type(step).__name__}; it must return step(batch)"
                )
            return step
        return StandardStep(self, device, replica)

    def host_inputs(self, batch: int) -> Any:
        """The inputs of one micro-batch, as a data loader would give them (on the host)."""
        if callable(self.inputs):
            return self.inputs(batch)
        return _resize(self.inputs, batch, self.batch_dim)

    def describe(self) -> dict[str, Any]:
        """The settings as plain values, for reports and JSON."""
        if self.build is not None:
            return {"name": self.name, "form": "step function"}
        optimizer = self.optimizer
        if not isinstance(optimizer, str) and optimizer is not None:
            if isinstance(optimizer, tuple):
                optimizer = optimizer[0]
            optimizer = getattr(optimizer, "__name__", type(optimizer).__name__)
        loss = self.loss if isinstance(self.loss, str) or self.loss is None else "callable"
        return {
            "name": self.name,
            "form": "inference" if self.inference else "training",
            "precision": self.precision,
            "optimizer": None if self.inference else optimizer,
            "loss": None if self.inference else loss or "auto",
            "memory_format": self.memory_format,
            "checkpointing": self.checkpointing,
            "accumulate": self.accumulate,
            "set_to_none": self.set_to_none,
            "clip_grad_norm": self.clip_grad_norm,
            "ema": self.ema,
            "evaluate": self.evaluate,
            "keep_outputs": self.keep_outputs,
        }


def _one_of(what: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise WorkloadError(f"{what} must be one of {', '.join(allowed)}; found {value!r}")


def _check_batch_dim(example: Any, dim: int) -> None:
    """Some tensor of the example must have the dimension that is said to be the batch."""
    shapes = [tuple(t.shape) for t in tree_leaves(example) if isinstance(t, Tensor)]
    if not isinstance(dim, int) or dim < 0 or not any(len(shape) > dim for shape in shapes):
        raise WorkloadError(
            f"batch_dim={dim!r} is not a dimension of the example inputs (shapes "
            f"{', '.join(map(str, shapes)) or 'none: no tensor was given'}); it is usually 0"
        )


def _resize(example: Any, batch: int, dim: int) -> Any:
    """An example batch made longer or shorter: rows are repeated, nothing is kept of floats."""
    if isinstance(example, Tensor):
        if example.dim() <= dim or example.shape[dim] == 0:
            return example
        shape = list(example.shape)
        shape[dim] = batch
        if example.is_floating_point():
            return torch.empty(shape, dtype=example.dtype)
        rows = torch.arange(batch) % example.shape[dim]
        return example.detach().cpu().index_select(dim, rows)
    if isinstance(example, Mapping):
        return {key: _resize(value, batch, dim) for key, value in example.items()}
    if isinstance(example, tuple) and hasattr(example, "_fields"):
        return type(example)(*(_resize(value, batch, dim) for value in example))
    if isinstance(example, (list, tuple)):
        return type(example)(_resize(value, batch, dim) for value in example)
    return example
