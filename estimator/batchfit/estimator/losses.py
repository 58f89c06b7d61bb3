"""Losses by name, and the targets that they need when the workload gives none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import WorkloadError

#: What ``loss=`` may name. "model" takes the loss that the model returns (Hugging Face).
LOSSES = ("cross_entropy", "mse", "l1", "smooth_l1", "bce_with_logits", "sum", "mean", "model")

# Weight of auxiliary classifiers in torchvision's reference scripts (segmentation, Inception).
_AUX_WEIGHT = {"aux": 0.5, "aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}


#: Modules and functions of torch that take (output, target), by the kind of target they need.
_CRITERIA: dict[Any, str] = {
    nn.CrossEntropyLoss: "cross_entropy", F.cross_entropy: "cross_entropy",
    nn.NLLLoss: "cross_entropy", F.nll_loss: "cross_entropy",
    **dict.fromkeys((nn.MSELoss, F.mse_loss), "mse"),
    **dict.fromkeys((nn.L1Loss, F.l1_loss), "l1"),
    **dict.fromkeys((nn.SmoothL1Loss, F.smooth_l1_loss), "smooth_l1"),
    **dict.fromkeys((nn.HuberLoss, F.huber_loss), "mse"),
    **dict.fromkeys((nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits), "mse"),
    **dict.fromkeys((nn.BCELoss, F.binary_cross_entropy), "mse"),
    **dict.fromkeys((nn.KLDivLoss, F.kl_div), "mse"),
}  # fmt: skip


def criterion_kind(loss: Any) -> str | None:
    """The named loss whose target a criterion such as ``nn.CrossEntropyLoss()`` takes; or None."""
    if isinstance(loss, nn.Module):
        return _CRITERIA.get(type(loss))
    try:
        return _CRITERIA.get(loss)
    except TypeError:  # a callable that cannot be hashed
        return None


def find_loss(outputs: Any) -> Any:
    """The loss in a model's outputs (attribute or key ``loss``), or None."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", None)


def main_output(outputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The tensor that the loss is computed on, and auxiliary outputs by name.

    Looks for ``logits``, ``out``, ``last_hidden_state``, ``sample``, else takes the first float
    tensor. Raises WorkloadError where there is none.
    """
    if isinstance(outputs, Tensor):
        return outputs, {}
    fields: dict[str, Any]
    if isinstance(outputs, Mapping):
        fields = dict(outputs)
    elif hasattr(outputs, "_asdict"):
        fields = dict(outputs._asdict())
    elif isinstance(outputs, (list, tuple)):
        fields = {str(i): value for i, value in enumerate(outputs)}
    else:
        fields = dict(vars(outputs)) if hasattr(outputs, "__dict__") else {}
    floats = {k: v for k, v in fields.items() if isinstance(v, Tensor) and v.is_floating_point()}
    for name in ("logits", "out", "last_hidden_state", "sample", *floats):
        if name in floats:
            return floats[name], {k: v for k, v in floats.items() if k in _AUX_WEIGHT}
    raise WorkloadError(
        f"the model returned {type(outputs).__name__} without a floating-point tensor to compute a "
        "loss on; give the workload loss=callable(outputs, inputs)"
    )


def _is_token_model(logits: Tensor, inputs: Any) -> bool:
    """(N, T, V) logits of integer inputs (N, T): a language model, classes last."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    if isinstance(values, Tensor):
        values = (values,)
    return logits.dim() == 3 and any(
        isinstance(v, Tensor) and not v.is_floating_point() and tuple(v.shape) == logits.shape[:2]
        for v in values
    )


def target_shape(name: str, logits: Tensor, inputs: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the target of a named loss, for outputs of this shape."""
    if name != "cross_entropy":
        return tuple(logits.shape), logits.dtype
    if logits.dim() < 2:
        raise WorkloadError(
            f"cross_entropy needs outputs of shape (batch, classes, ...), found "
            f"{tuple(logits.shape)}; name another loss ({', '.join(LOSSES)}) or pass a callable"
        )
    if _is_token_model(logits, inputs):
        return tuple(logits.shape[:2]), torch.int64
    return (logits.shape[0], *logits.shape[2:]), torch.int64


_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    if logits.dim() == 3 and logits.shape[:2] == target.shape:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return F.cross_entropy(logits, target)


def named_loss(name: str, outputs: Any, target: Tensor | None) -> Tensor:
    """Compute a named loss on a model's outputs; auxiliary outputs get their usual weight."""
    if name == "model":
        loss = find_loss(outputs)
        if not isinstance(loss, Tensor):
            raise WorkloadError(
                "loss='model' was asked for, but the model returned no loss; pass labels among the "
                "inputs, or name a loss such as 'cross_entropy'"
            )
        return loss
    logits, aux = main_output(outputs)
    if name in ("sum", "mean"):
        return logits.sum() if name == "sum" else logits.mean()
    assert target is not None
    function = _cross_entropy if name == "cross_entropy" else _FUNCTIONS[name]
    loss = function(logits, target)
    for key, value in aux.items():
        loss = loss + _AUX_WEIGHT[key] * function(value, target)
    return loss
