"""Optimizers by name, class, factory or example."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import TargetError, WorkloadError

#: Arguments that a bare name stands for, where torch's own default is not what people run.
_USUAL: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.1, "momentum": 0.9}}

OptimizerSpec = (
    str
    | type[Optimizer]
    | tuple[Any, Mapping[str, Any]]
    | Callable[[Iterable[nn.Parameter]], Optimizer]
    | Optimizer
    | None
)


def optimizer_names() -> dict[str, type[Optimizer]]:
    """Every optimizer of ``torch.optim`` by its lower-case name."""
    found = {}
    for name in dir(torch.optim):
        value = getattr(torch.optim, name)
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            found[name.lower()] = value
    return found


def parse_optimizer(text: str) -> tuple[type[Optimizer], dict[str, Any]] | None:
    """Read ``adamw``, ``sgd:momentum=0,nesterov=False`` or ``none``.

    A bare ``sgd`` has momentum 0.9; every other name stands for torch's defaults.

    Raises:
        TargetError: no optimizer of that name, or arguments that cannot be read.
    """
    name, _, rest = text.partition(":")
    name = name.strip().lower()
    if name in ("none", ""):
        return None
    classes = optimizer_names()
    if name not in classes:
        close = difflib.get_close_matches(name, classes, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else "see torch.optim for the names"
        raise TargetError(f"torch.optim has no optimizer named {name!r}; {hint}")
    arguments = dict(_USUAL.get(name, {}))
    if rest.strip():
        try:
            # Parsed as a call, never evaluated: values are literals such as 0.9 or (0.9, 0.95).
            call = ast.parse(f"f({rest})", mode="eval").body
            assert isinstance(call, ast.Call)
            if call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError("only key=value")
            arguments |= {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        except (ValueError, SyntaxError):
            raise TargetError(
                f"cannot read {rest!r} in the optimizer {text!r}; write name:key=value,key=value"
            ) from None
    return classes[name], arguments


def _groups_like(example: Optimizer, twins: Mapping[int, nn.Parameter]) -> list[dict[str, Any]]:
    groups = []
    for group in example.param_groups:
        mine = [twins.get(id(p)) for p in group["params"]]
        if any(p is None for p in mine):
            raise WorkloadError(
                "the optimizer holds parameters that the model does not have; give the workload a "
                "factory: optimizer=lambda params: ..."
            )
        groups.append({**group, "params": mine})
    return groups


def build_optimizer(
    spec: OptimizerSpec, params: list[nn.Parameter], twins: Mapping[int, nn.Parameter]
) -> Optimizer | None:
    """Make the optimizer for the trainable parameters of a model.

    Args:
        spec: a name, a class, ``(class or name, arguments)``, a factory of parameters, an existing
            optimizer (its class and groups are taken, itself left alone), or None.
        params: trainable parameters.
        twins: for an existing optimizer, its parameters' ids -> the ones to use.

    Raises:
        WorkloadError: the optimizer does not exist or does not take those arguments.
    """
    if spec is None:
        return None
    arguments: Mapping[str, Any] = {}
    if isinstance(spec, tuple):
        spec, arguments = spec
    if isinstance(spec, str):
        parsed = parse_optimizer(spec)
        if parsed is None:
            return None
        spec, arguments = parsed[0], {**parsed[1], **arguments}
    if not params:
        raise WorkloadError(
            "no parameter of the model requires a gradient, so there is nothing to optimize; pass "
            "optimizer=None or inference=True (--optimizer none, --inference)"
        )
    try:
        if isinstance(spec, Optimizer):
            same: Any = type(spec)
            return same(_groups_like(spec, twins))  # type: ignore[no-any-return]
        make: Any = spec
        made = make(params, **arguments)
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            f"the optimizer could not be made ({error}); check its name and arguments"
        ) from error
    if not hasattr(made, "step"):
        raise WorkloadError(
            f"optimizer= gave a {type(made).__name__}; it must give an object with a step() method"
        )
    return made  # type: ignore[no-any-return]
