"""What TARGET stands for: from the text to a workload."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from batchfit.estimator import TargetError, Workload, WorkloadError

from . import files
from .options import WORKLOAD_OPTIONS, ModelOptions

# library -> (what it is installed by)
_EXTRAS = {"torchvision": "vision", "timm": "vision", "transformers": "hf"}


@dataclass(frozen=True, slots=True)
class Target:
    """A target that was found.

    Attributes:
        text: as the user wrote it.
        workload: what it stands for, with the settings of the command line.
        inputs: one sample's inputs in words; may be empty.
        notes: what the user should know about how it was read.
    """

    text: str
    workload: Workload
    inputs: str
    notes: tuple[str, ...] = ()


def find_target(text: str, given: dict[str, Any], stack: ExitStack) -> Target:
    """Find what a target stands for.

    Args:
        text: as on the command line.
        given: the options that the user gave.
        stack: what must stay in place while the workload is used (``sys.path``).

    Raises:
        TargetError, WorkloadError: there is no such target, or it cannot be used as asked.
    """
    options = ModelOptions.of(given)
    notes: tuple[str, ...] = ()
    kind, colon, name = text.partition(":")
    if colon and kind in ("torchvision", "timm", "hf") and name:
        if kind == "hf":
            _need("transformers")
            from .hf import hf_workload

            workload, inputs, notes = hf_workload(name, options, training="inference" not in given)
        else:
            _need(kind)
            from . import vision

            find: Callable[[str, ModelOptions], tuple[Workload, str]] = (
                vision.timm_workload if kind == "timm" else vision.torchvision_workload
            )
            workload, inputs = find(name, options)
    else:
        workload, inputs = _user_target(text, options, stack)
    return Target(text, _with_settings(workload, text, given), inputs, notes)


def _user_target(text: str, options: ModelOptions, stack: ExitStack) -> tuple[Workload, str]:
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        if text.endswith(".py"):
            raise TargetError(
                f"{text!r} names a file but nothing in it; write {text}:NAME with the name of a "
                "Workload, a function that makes one or a model, or a module"
            )
        raise TargetError(
            f"cannot tell what {text!r} is; write torchvision:{text}, timm:{text} or hf:{text}, or "
            "for your own code FILE.py:NAME or package.module:NAME"
        )
    load = files.load_file if where.endswith(".py") else files.load_module
    value = files.pick(load(where, stack), name, where)
    return files.user_workload(value, text, options)


def _need(library: str) -> None:
    """Say how to install a library of an extra that is missing."""
    if importlib.util.find_spec(library) is None:
        raise TargetError(f"{library} is not installed; pip install 'batchfit[{_EXTRAS[library]}]'")


def _with_settings(workload: Workload, text: str, given: dict[str, Any]) -> Workload:
    """The workload with the settings that the command line gives."""
    settings = {name: given[name] for name in WORKLOAD_OPTIONS if name in given}
    if not workload.name:
        settings["name"] = text
    elif workload.build is None and not settings:
        return workload
    if workload.build is not None and set(settings) - {"name"}:
        names = ", ".join("--" + n.replace("_", "-") for n in settings if n != "name")
        raise WorkloadError(
            f"{text} is a step function, which settles that itself; drop {names} or change it"
        )
    return workload.with_(**settings)
