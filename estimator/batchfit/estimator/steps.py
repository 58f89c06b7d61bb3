"""The standard training step, written as people write it. Runs on any device, meta included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .errors import WorkloadError
from .losses import criterion_kind, find_loss, main_output, named_loss, target_shape
from .optimizers import build_optimizer

if TYPE_CHECKING:
    from .workload import Workload

Replica = Callable[[nn.Module], tuple[nn.Module, Mapping[int, nn.Parameter]]]


class StandardStep:
    """``step(batch)``: inputs to the device, forward, loss, backward, optimizer.

    As in a plain training loop, the outputs and the loss of a step stay alive until the next
    forward pass has made new ones (see ``Workload.keep_outputs``), and the inputs until the next
    batch arrives.

    Attributes:
        modules: what lives on the device besides the optimizer.
    """

    def __init__(self, workload: Workload, device: torch.device, replica: Replica | None) -> None:
        from .workload import MEMORY_FORMATS, PRECISIONS

        self._workload = workload
        self._device = device
        self._dtype, self._autocast, scaler = PRECISIONS[workload.precision]
        self._layout = MEMORY_FORMATS[workload.memory_format]
        model, twins = _make_model(workload, replica)
        # A compiled module runs its original here; the recorder says so.
        self.compiled = hasattr(model, "_orig_mod")
        model = getattr(model, "_orig_mod", model)
        refuse_lazy(model)
        if self._dtype is not torch.float32:
            model = model.to(self._dtype)
        self._model = model.to(device)
        if self._layout is torch.channels_last:
            self._model = self._model.to(memory_format=torch.channels_last)
        self._model.train(not workload.inference)
        if workload.checkpointing:
            _enable_checkpointing(self._model)
        self.modules: list[nn.Module] = [self._model]
        self._ema: AveragedModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        if not workload.inference:
            params = [p for p in self._model.parameters() if p.requires_grad]
            self._optimizer = build_optimizer(workload.optimizer, params, twins)
            if workload.ema:
                average = get_ema_multi_avg_fn(0.9999)  # type: ignore[no-untyped-call]
                self._ema = AveragedModel(self._model, multi_avg_fn=average)
                self.modules.append(self._ema)
        self._scaler = torch.amp.GradScaler(device.type, enabled=scaler)
        self._loss_function = workload.loss
        if isinstance(workload.loss, nn.Module):  # it may hold weights of classes
            self._loss_function = copy.deepcopy(workload.loss).to(device)
        self._outputs: Any = None
        self._loss: Tensor | None = None
        self._inputs: Any = None
        self._targets: Any = None
        self._target_shape: tuple[tuple[int, ...], torch.dtype] | None = None

    def __call__(self, batch: int) -> None:
        """One step at this (micro-)batch size."""
        workload = self._workload
        if workload.inference:
            self._infer(batch)
            return
        for _ in range(workload.accumulate):
            self._micro_step(batch)
        self._update()
        if workload.evaluate:
            self._model.eval()
            self._infer(batch)
            self._model.train()

    def example(self, batch: int) -> Any:
        """The inputs of a batch on the device, as the model gets them."""
        return self._to_device(self._workload.host_inputs(batch))

    def _micro_step(self, batch: int) -> None:
        self._load(batch)
        with self._precision():
            self._outputs = self._call()
            self._loss = self._compute_loss(batch)
        if not self._workload.keep_outputs:
            self._outputs = None
        if not self._loss.requires_grad:
            raise WorkloadError(
                "the loss does not depend on any parameter that requires a gradient; train at "
                "least one parameter, or pass inference=True"
            )
        self._scaler.scale(self._loss).backward()  # type: ignore[no-untyped-call]

    def _infer(self, batch: int) -> None:
        self._load(batch)
        with torch.no_grad(), self._precision():
            self._outputs = self._call()

    def _update(self) -> None:
        workload = self._workload
        if self._optimizer is None:
            self._model.zero_grad(set_to_none=workload.set_to_none)
            return
        if workload.clip_grad_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), workload.clip_grad_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._ema is not None:
            self._ema.update_parameters(self._model)
        self._optimizer.zero_grad(set_to_none=workload.set_to_none)

    def _precision(self) -> Any:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _load(self, batch: int) -> None:
        """The next batch: the names of the last one are rebound first, as a for loop does."""
        self._inputs = self._targets = None
        self._inputs = self.example(batch)
        if self._workload.targets is not None:
            self._targets = self._to_device(self._workload.targets(batch))
        elif self._target_shape is not None:
            shape, dtype = self._target_shape
            self._targets = torch.zeros(shape, dtype=dtype).to(self._device)

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            cast = value.is_floating_point() and self._dtype is not torch.float32
            last = self._layout is torch.channels_last and value.dim() == 4
            return value.to(
                self._device,
                self._dtype if cast else value.dtype,
                memory_format=torch.channels_last if last else torch.preserve_format,
            )
        if isinstance(value, Mapping):
            return {key: self._to_device(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._to_device(item) for item in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_device(item) for item in value)
        return value

    def _call(self) -> Any:
        if isinstance(self._inputs, Mapping):
            return self._model(**self._inputs)
        if isinstance(self._inputs, (list, tuple)):
            return self._model(*self._inputs)
        return self._model(self._inputs)

    def _compute_loss(self, batch: int) -> Tensor:
        loss = self._loss_function
        kind = criterion_kind(loss)
        if callable(loss) and kind is None:
            return _scalar(loss(self._outputs, self._inputs))
        if loss is None:
            loss = "model" if isinstance(find_loss(self._outputs), Tensor) else "cross_entropy"
        if kind or loss not in ("model", "sum", "mean"):
            self._make_targets(kind or str(loss))
        if callable(loss):
            return _scalar(loss(main_output(self._outputs)[0], self._targets))
        return named_loss(loss, self._outputs, self._targets)

    def _make_targets(self, kind: str) -> None:
        if self._targets is not None:
            return
        logits, _ = main_output(self._outputs)
        self._target_shape = target_shape(kind, logits, self._inputs)
        shape, dtype = self._target_shape
        self._targets = torch.zeros(shape, dtype=dtype).to(self._device)


def _scalar(result: Any) -> Tensor:
    if not isinstance(result, Tensor) or result.dim() != 0:
        raise WorkloadError(
            "the loss callable must return a scalar tensor; it is called with (outputs, inputs)"
        )
    return result


def _make_model(
    workload: Workload, replica: Replica | None
) -> tuple[nn.Module, Mapping[int, nn.Parameter]]:
    if isinstance(workload.model, nn.Module):
        if replica is not None:
            return replica(workload.model)
        return workload.model, {id(p): p for p in workload.model.parameters()}
    assert workload.model is not None
    model = workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"the model function returned {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model, {id(p): p for p in model.parameters()}


def refuse_lazy(model: nn.Module) -> None:
    """Raise WorkloadError for a module whose parameters have no shape yet."""
    for path, module in model.named_modules():
        for name, param in module.named_parameters(path, recurse=False):
            if isinstance(param, UninitializedParameter):
                raise WorkloadError(
                    f"parameter {name!r} of a {type(module).__name__} has no shape yet (a lazy "
                    "module); run one batch through the model first, or give its sizes"
                )


def _enable_checkpointing(model: nn.Module) -> None:
    """Hugging Face's (renamed in transformers 5) and timm's own switches."""
    for name in (
        "activation_checkpointing_enable",
        "gradient_checkpointing_enable",
        "set_grad_checkpointing",
    ):
        switch = getattr(model, name, None)
        if switch is not None:
            switch()
            return
    raise WorkloadError(
        f"{type(model).__name__} has no gradient checkpointing of its own (neither "
        "gradient_checkpointing_enable() nor set_grad_checkpointing()); wrap its blocks in "
        "torch.utils.checkpoint and leave checkpointing off"
    )
