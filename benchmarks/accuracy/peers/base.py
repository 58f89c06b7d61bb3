"""What a peer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmarks.accuracy.jobs.base import Job, Parts
from torch import nn

LARGE = 2 * 10**9  # parameters; above it a model is made on meta for tools that would copy it


class CannotAnswer(Exception):
    """The tool has no answer for this job; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One tool or rule.

    Attributes:
        name: in the table.
        what: what it is and where it comes from.
        peak: bytes at a batch; None if it only names a batch.
        largest: the batch for a GPU of so many bytes, whatever the job; None if it names bytes.
    """

    name: str
    what: str
    peak: Callable[[Job, int], int] | None = None
    largest: Callable[[int], int] | None = None


def parts_of(job: Job) -> Parts:
    if job.parts is None:
        raise CannotAnswer("takes a module; the job is not one module's training")
    return job.parts()


def on_meta(parts: Parts) -> nn.Module:
    with torch.device("meta"):
        return parts.model()


def parameters(parts: Parts) -> int:
    """How many, tied ones once."""
    return sum(p.numel() for p in on_meta(parts).parameters())


def real_if_small(parts: Parts) -> nn.Module:
    return on_meta(parts) if parameters(parts) > LARGE else parts.model()


def sample_shape(parts: Parts) -> tuple[int, ...]:
    """The shape of one sample, for tools that take a shape and make the tensor."""
    inputs = parts.inputs(2)
    tensors = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    if len(tensors) != 1:
        raise CannotAnswer("takes one input tensor")
    return tuple(tensors[0].shape[1:])
