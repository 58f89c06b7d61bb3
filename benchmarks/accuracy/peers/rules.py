"""Rules of thumb, as answers and code on the web give them."""

from __future__ import annotations

from benchmarks.accuracy.jobs.base import Job

from .base import Peer, parameters, parts_of


def four_times_batch(job: Job, batch: int) -> int:
    return 4 * parameters(parts_of(job)) * batch


def four_times_weights(job: Job, batch: int) -> int:
    """Weights, gradients and two states of Adam; nothing for activations."""
    parts = parts_of(job)
    return 4 * parameters(parts) * parts.dtype.itemsize


def pyvideoai(total: int) -> int:
    """kiyoon/PyVideoAI, exp_configs (i3d_resnet50_32frame_base.py)."""
    return 16 if total > 20e9 else 8 if total > 10e9 else 4


def doubling(total: int) -> int:
    """SygesteKIDsPaaBlokken/02456-Project, utils/batch_size.py; below 16 GB it refuses: 0."""
    return 0 if total < 16e9 else 64 if total < 32e9 else 128 if total < 64e9 else 256


RULES = (
    Peer("parameters x 4 x batch", "4 bytes per parameter and sample", four_times_batch),
    Peer("4 x weights", "weights, gradients, two optimizer states", four_times_weights),
    Peer("thresholds 16/8/4", "kiyoon/PyVideoAI, by total memory", largest=pyvideoai),
    Peer("thresholds 64/128/256", "02456-Project/utils/batch_size.py", largest=doubling),
)
