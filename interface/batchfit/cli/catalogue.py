"""``batchfit gpus``: the catalogue as a table or JSON, without loading torch."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import sys
from typing import TYPE_CHECKING

import click

from .console import Table, plain_bytes, render

if TYPE_CHECKING:
    from batchfit.estimator import GPU

SCHEMA = "batchfit.gpus/1"


def _all_gpus() -> tuple[GPU, ...]:
    """The catalogue. Where ``batchfit.estimator`` is not loaded, its ``__init__`` is passed over.

    That ``__init__`` loads torch, which takes seconds; ``gpus`` needs none of it.
    """
    package = "batchfit.estimator"
    shell = None
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        shell = importlib.util.module_from_spec(spec)
        sys.modules[package] = shell
    try:
        return importlib.import_module(f"{package}.gpus").all_gpus()  # type: ignore[no-any-return]
    finally:
        if shell is not None:
            del sys.modules[package]


def _chosen(words: tuple[str, ...]) -> list[GPU]:
    wanted = [word.lower() for text in words for word in text.replace("-", " ").split()]
    found = []
    for gpu in _all_gpus():
        told = f"{gpu.name} {gpu.vendor} {gpu.arch} {gpu.category} {gpu.nominal_gb}GB".lower()
        if all(word in told.replace("-", " ").split() or word in told for word in wanted):
            found.append(gpu)
    if not found:
        names = [gpu.name for gpu in _all_gpus()]
        text = " ".join(words)
        close = difflib.get_close_matches(text.upper(), names, 3, 0.4)
        hint = f"closest: {', '.join(close)}" if close else "`batchfit gpus` lists them all"
        raise click.ClickException(f"no GPU of the catalogue matches {text!r}; {hint}")
    return found


def gpus_json(words: tuple[str, ...]) -> str:
    """The GPUs that pass the filter, as one JSON object (docs/json.md)."""
    rows = [
        {
            "name": gpu.name,
            "vendor": gpu.vendor,
            "category": gpu.category,
            "arch": gpu.arch,
            "total_bytes": gpu.total_bytes,
            "context_bytes": gpu.context_bytes,
            "sm_count": gpu.sm_count,
            "bandwidth_gbs": gpu.bandwidth_gbs,
            "exact_total": gpu.exact_total,
            "note": gpu.note,
        }
        for gpu in _chosen(words)
    ]
    return json.dumps({"schema": SCHEMA, "gpus": rows}, indent=2)


def gpus_table(words: tuple[str, ...]) -> str:
    """The GPUs that pass the filter, as a table."""
    table = Table(["GPU", "memory", "context", "arch", "SMs", "GB/s", "kind"], left=(0, 3, 6))
    for gpu in _chosen(words):
        total = plain_bytes(gpu.total_bytes)
        table.row(
            gpu.name, total if gpu.exact_total else f"~{total}", plain_bytes(gpu.context_bytes),
            gpu.arch, str(gpu.sm_count), f"{gpu.bandwidth_gbs:.0f}", gpu.category,
        )  # fmt: skip
    return render(
        table.rich(),
        "memory: what torch.cuda reports, the smallest value seen; ~ where it is derived from the "
        "data sheet, not from a log",
        "context: what a process holds outside PyTorch's allocator, an estimate",
        at_least=80,
    )
