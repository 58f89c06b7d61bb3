"""What is known of an operator from its schema."""

from __future__ import annotations

from typing import Any

import torch

from . import (  # noqa: F401 - they register themselves
    kernels_attention,
    kernels_dnn,
    kernels_index,
    kernels_math,
    kernels_norm,
)
from .calls import KERNELS, uses_cublas
from .values import Values


class Operator:
    """Facts about one operator overload; looked up once per trace."""

    __slots__ = (
        "cublas",
        "data_dependent",
        "deterministic",
        "kernel",
        "mutates",
        "name",
        "returns",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        # Results that may be new storages: those without an alias annotation.
        self.returns = any(r.alias_info is None for r in schema.returns)
        self.mutates = tuple(
            i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        )
        self.data_dependent = torch.Tag.dynamic_output_shape in func.tags
        self.deterministic = Values.deterministic(func)
        self.kernel = KERNELS.get(func)
        self.cublas = uses_cublas(func)
