"""The options of ``batchfit calibrate`` and ``batchfit validate``. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from .options import AS_JSON, CANDIDATES_GROUP, MODEL_GROUP, WORKLOAD_GROUP

_F = TypeVar("_F", bound=Callable[..., Any])

_CALIBRATE = (
    click.option(
        "--device", metavar="DEVICE",
        help="cuda, cuda:1, xpu, mps or cpu.  [default: the accelerator that torch sees]",
    ),
    click.option(
        "--budget", metavar="SIZE",
        help="What PyTorch may reserve, as 10GiB; enforced.  [default: what the device has free]",
    ),
    click.option(
        "--margin", metavar="SIZE",
        help="Memory to keep free.  [default: 256MiB, none beside --budget]",
    ),
    click.option(
        "--risk", type=float, metavar="P", default=0.01,
        help="Accepted probability of running out of memory.  [default: 0.01]",
    ),
    click.option(
        "--probes", type=click.IntRange(1), metavar="N", default=3,
        help="Runs before the answer itself is tried, at most.  [default: 3]",
    ),
    click.option("--verify/--no-verify", default=True, help="Run the answer itself."),
    click.option("--blind", is_flag=True, help="Do not trace; lay a line through the probes."),
    click.option("--isolate", is_flag=True, help="Run each probe in a process of its own."),
    *CANDIDATES_GROUP,
    click.option("--max-batch", type=int, metavar="N", help="Never answer more than N."),
    click.option(
        "--dataset", type=int, metavar="N",
        help="Samples per epoch: a batch is never larger, and the time of an epoch is told.",
    ),
    click.option(
        "--target-batch", type=int, metavar="N",
        help="Samples per optimizer step that are wanted: answer with micro-batches.",
    ),
    click.option(
        "--tuned-for", type=int, metavar="N",
        help="The batch that the learning rate is for, to say how others scale it.",
    ),
    click.option(
        "--throughput", type=float, metavar="SHARE", default=0.95,
        help="Share of the best throughput that an efficient batch keeps.  [default: 0.95]",
    ),
    click.option(
        "--epoch-seconds", type=float, metavar="S",
        help="With --dataset: the largest batch whose epoch takes at most S seconds.",
    ),
    click.option(
        "--saved", metavar="FILE",
        help="Use the calibration in FILE if it is of this job here; else calibrate and write it.",
    ),
    AS_JSON,
)  # fmt: skip

_VALIDATE = (
    click.option("--batch", type=int, metavar="N", required=True, help="The measured batch size."),
    click.option(
        "--measured", metavar="SIZE", help="The peak that was measured, as 5692MiB or in bytes.",
    ),
    click.option("--reserved", is_flag=True, help="--measured is what was reserved."),
    click.option("--log", metavar="LOG", help="A trainer's log to read the peak from."),
    click.option(
        "--level", type=float, metavar="P", default=0.95,
        help="Probability of the interval.  [default: 0.95]",
    ),
    click.option(
        "--here/--anywhere", default=False,
        help="Refuse a calibration of another device or other software than these.",
    ),
    AS_JSON,
)  # fmt: skip


def calibrate_options(command: _F) -> _F:
    """All options of ``batchfit calibrate``."""
    for option in reversed((*_CALIBRATE, *WORKLOAD_GROUP, *MODEL_GROUP)):
        command = option(command)
    return command


def validate_options(command: _F) -> _F:
    """All options of ``batchfit validate``."""
    for option in reversed(_VALIDATE):
        command = option(command)
    return command
