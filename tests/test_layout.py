"""The layout: one namespace package in three source roots, and what each may import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata, resources
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOTS = ("estimator", "calibration", "interface")


@pytest.mark.parametrize("root", ROOTS)
def test_a_root_holds_only_the_namespace(root: str) -> None:
    entries = {path.name for path in (ROOT / root).iterdir() if path.name != "__pycache__"}
    assert entries == {"batchfit"}
    assert not (ROOT / root / "batchfit" / "__init__.py").exists()


@pytest.mark.parametrize("package", ["estimator", "calibration", "cli"])
def test_every_part_is_importable_and_typed(package: str) -> None:
    assert resources.files(f"batchfit.{package}").joinpath("py.typed").is_file()


def test_a_users_own_module_shadows_nothing(tmp_path: Path) -> None:
    for name in ("estimator.py", "calibration.py", "interface.py", "cli.py"):
        (tmp_path / name).write_text("raise RuntimeError('the wrong module')\n")
    code = "import batchfit.estimator, batchfit.calibration, batchfit.cli"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)


def test_source_files_are_of_a_readable_length() -> None:
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "interface").rglob("*.py")
    }
    assert len(lengths) > 10
    assert {name: n for name, n in lengths.items() if n > 300} == {}


def test_no_exception_is_swallowed() -> None:
    for root in ROOTS:
        for path in (ROOT / root).rglob("*.py"):
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            for line, following in pairwise(lines):
                assert not (line.startswith("except") and following == "pass"), path


def test_the_console_entry_is_there() -> None:
    try:
        distribution = metadata.distribution("batchfit")
    except metadata.PackageNotFoundError:
        pytest.skip("batchfit runs from its sources here, it is not installed")
    scripts = {e.name: e.value for e in distribution.entry_points if e.group == "console_scripts"}
    assert scripts == {"batchfit": "batchfit.cli:main"}
