"""The result file: one JSON, written anew after every finding, so that a cut leaves the rest."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .jobs import Job
from .worker import parts_of

SCHEMA = "batchfit.cuda-truth/1"
# A result is continued only where all of these are the same.
_KEY = ("name", "total_bytes", "torch", "cuda", "hip", "cudnn", "environment")
_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "CUDA_MODULE_LOADING",
    "TORCH_CUDNN_V8_API_DISABLED", "TORCH_BLAS_PREFER_CUBLASLT",
)  # fmt: skip


class ResultError(Exception):
    """The result file cannot be read, written or continued; the message says why."""


def surroundings() -> dict[str, Any]:
    """What besides the card decides the numbers: variables that are set, and versions."""
    versions = {}
    for package in ("batchfit", "torchvision", "transformers", "nvidia-cudnn-cu12",
                    "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cublas-cu12"):  # fmt: skip
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "versions": versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


class Results:
    """What is known of each job.

    Attributes:
        data: the file's content: ``schema``, ``machine``, and ``jobs`` by name, each with
            ``family``, ``batches``, ``prediction``, ``parts`` (name -> what was found), ``outside``
            (bytes outside the allocator at start and end), ``status``, and ``reasons`` (kind of
            task -> why it did not come to its end).
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self._path = path
        self.data: dict[str, Any] = {"schema": SCHEMA, "machine": machine, "jobs": {}}

    @classmethod
    def read(cls, path: Path) -> Results:
        """The results in a file.

        Raises:
            ResultError: it is not one of ours.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResultError(f"cannot read {path}: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ResultError(f"{path} is no result of this benchmark (schema {SCHEMA})")
        found = cls(path, data["machine"])
        found.data = data
        return found

    @classmethod
    def open(cls, path: Path, machine: dict[str, Any]) -> Results:
        """Those of an earlier run on this machine, or new ones.

        Raises:
            ResultError: the file is of another machine, or cannot be read.
        """
        if not path.exists():
            return cls(path, machine)
        earlier = cls.read(path)
        other = [k for k in _KEY if earlier.data["machine"].get(k) != machine.get(k)]
        if other:
            raise ResultError(
                f"{path} was measured with another {', '.join(other)}; name another file for --out"
            )
        earlier.data["machine"] = machine
        return earlier

    def job(self, job: Job) -> dict[str, Any]:
        """The entry of a job, made if there is none."""
        entry: dict[str, Any] = self.data["jobs"].setdefault(
            job.name, {"family": job.family, "parts": {}, "status": "not run", "reasons": {}}
        )
        entry["batches"] = list(job.batches)
        return entry

    def give_reason(self, job: Job, kind: str, reason: str) -> None:
        """Why a task of this kind did not come to its end; "" takes that back."""
        reasons = self.job(job)["reasons"]
        reasons.pop(kind, None)
        if reason:
            reasons[kind] = reason

    def known_parts(self, job: Job) -> list[str]:
        """Parts that need not be measured again: all but those for which there was no time."""
        parts = self.job(job)["parts"]
        return [name for name, found in parts.items() if not found.get("no_time")]

    def wants(self, job: Job, kind: str) -> bool:
        """Whether a task of this job has something left to do."""
        entry = self.job(job)
        if kind == "predict":
            return "prediction" not in entry
        have = self.known_parts(job)
        if kind == "benchmark":
            return "benchmark" not in have
        return any(part not in have for part in parts_of(job))

    def save(self) -> None:
        """Write the file; whoever reads it meanwhile sees the old one or the new one, whole."""
        draft = self._path.with_name(self._path.name + ".new")
        try:
            draft.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, self._path)
        except OSError as error:
            raise ResultError(f"cannot write {self._path}: {error}") from error

    def settle(self, jobs: Iterable[Job]) -> None:
        """Say of each job how far it came."""
        for job in jobs:
            entry = self.job(job)
            have, parts = self.known_parts(job), parts_of(job)
            measured = sum(part in have for part in parts)
            if measured == len(parts):
                entry["status"] = "done"
            elif measured:
                entry["status"] = "partial"
            else:
                entry["status"] = "failed" if entry["reasons"] else "not run"
