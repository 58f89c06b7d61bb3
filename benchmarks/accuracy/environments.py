"""Folders with pinned libraries, made at first use from ``environments.toml``."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PINS = Path(__file__).with_name("environments.toml")
DEFAULT_FOLDER = Path.home() / ".cache" / "batchfit-accuracy"


def packages(name: str) -> list[str]:
    """The pinned requirements of an environment."""
    pins: dict[str, Any] = tomllib.loads(PINS.read_text(encoding="utf-8"))
    if name not in pins:
        raise KeyError(f"no environment {name!r} in {PINS.name}; there are {', '.join(pins)}")
    shared = pins["shared"]["packages"] if pins[name].get("with_shared") else []
    return [*pins[name]["packages"], *shared]


def folder_of(name: str, root: Path) -> Path:
    """Where an environment lies: other pins or another Python, another folder."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(" ".join([python, *packages(name)]).encode()).hexdigest()[:10]
    return root / f"{name}-{digest}"


def prepare(name: str, root: Path, say: Callable[[str], object] = print) -> Path | None:
    """The folder of an environment; installed if it is missing. None for the installed libraries.

    Raises:
        RuntimeError: pip failed; its last line is told.
    """
    if not name:
        return None
    folder = folder_of(name, root)
    if folder.exists():
        return folder
    say(f"making {folder} with {', '.join(packages(name))}")
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=root))  # renamed when whole: no half environment stays
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    done = subprocess.run(
        [*command, str(unfinished), *packages(name)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(unfinished)
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"environment {name}: pip failed: {last}")
    unfinished.rename(folder)
    return folder


def variables(folders: list[Path]) -> dict[str, str]:
    """Environment variables of a process that has these folders in front of its path."""
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    fixed = {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "TIMM_FUSED_ATTN": "0"}
    return {"OMP_NUM_THREADS": "1", **kept, **fixed}
