"""Targets in the user's own code: ``FILE.py:NAME`` and ``package.module:NAME``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from batchfit.estimator import TargetError, Workload, WorkloadError

from .options import ModelOptions

# What the user's frames are told from: the code of Python, of installed packages and of batchfit.
_LIBRARIES = ("site-packages", "dist-packages", "importlib", "batchfit")

_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
_HOST_MEMORY = ("allocate memory", "out of memory", "can't allocate")


def user_line(error: BaseException) -> str:
    """``file:line`` of the user's code where an error, or what caused it, was raised; or "".

    Only files that :func:`load_file` or :func:`load_module` has loaded, or beside them, count.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in reversed(chain):
        if isinstance(link, SyntaxError) and link.filename in _user_files(link.filename):
            return f"{_short(link.filename)}:{link.lineno}"
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if _user_files(frame.filename):
                return f"{_short(frame.filename)}:{frame.lineno}"
    return ""


_folders: set[Path] = set()


def _user_files(name: str | None) -> tuple[str, ...]:
    """The file itself if it is the user's, else nothing."""
    if not name or name.startswith("<"):
        return ()
    path = Path(name).resolve()
    mine = any(folder in path.parents for folder in _folders)
    return (name,) if mine and not set(_LIBRARIES) & set(path.parts) else ()


def _short(name: str | None) -> str:
    path = Path(name or "")
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def load_file(file: str, stack: ExitStack) -> ModuleType:
    """Import a file by its path. Its folder is on ``sys.path`` until the stack is closed.

    Raises:
        TargetError: there is no such file, or it raised on import (names its line).
    """
    path = Path(file).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 3)
        hint = f"; in that folder: {', '.join(near)}" if near else "; check the path"
        raise TargetError(f"no file {file!r}{hint}")
    path = path.resolve()
    _on_path(path.parent, stack)
    name = path.stem if path.stem not in sys.modules else f"_batchfit_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    stack.callback(sys.modules.pop, name, None)
    loader = spec.loader
    _guarded(file, lambda: loader.exec_module(module))
    return module


def load_module(name: str, stack: ExitStack) -> ModuleType:
    """Import a module by its dotted name; the working directory is on ``sys.path``.

    Raises:
        TargetError: there is no such module, or it raised on import (names its line).
    """
    _on_path(Path.cwd(), stack)
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise TargetError(f"no module {name!r}: {error}; check the name and the folder") from error
    except ValueError as error:
        raise TargetError(
            f"{name!r} is not a module: {error}; write package.module:NAME"
        ) from error
    if found is None:
        hint = f"; for a file, write {name}.py:NAME" if Path(f"{name}.py").is_file() else ""
        raise TargetError(f"no module {name!r} can be imported from here{hint}")
    if found.origin:
        _folders.add(Path(found.origin).resolve().parent)
    loaded: list[ModuleType] = []
    _guarded(name, lambda: loaded.append(importlib.import_module(name)))
    return loaded[0]


def _on_path(folder: Path, stack: ExitStack) -> None:
    _folders.add(folder)
    sys.path.insert(0, str(folder))

    def off() -> None:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))

    stack.callback(off)


def _guarded(what: str, run: Callable[[], object], verb: str = "could not be imported") -> None:
    """Run the user's code; whatever it raises becomes one line with the file and line of it."""
    try:
        run()
    except (Exception, SystemExit) as error:
        place = user_line(error)
        at = f" at {place}" if place else ""
        if isinstance(error, MemoryError) or any(m in str(error) for m in _HOST_MEMORY):
            raise WorkloadError(
                f"{what} {verb}: not enough memory{at}; name a function that builds the model "
                "instead of a model that exists: it is then built without data"
            ) from error
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, SyntaxError):
            said = f"{type(error).__name__}: {error.msg}"
        hint = "; put what runs a script under if __name__ == '__main__'"
        raise TargetError(
            f"{what} {verb}{at}: {said}{hint if isinstance(error, SystemExit) else ''}"
        ) from error


def pick(module: ModuleType, name: str, where: str) -> Any:
    """An attribute of the user's module, which may be dotted.

    Raises:
        TargetError: there is none; names the closest ones.
    """
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            names = [n for n in vars(value) if not n.startswith("_")]
            close = difflib.get_close_matches(part, names, 3, 0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else _offer(value, where)
            raise TargetError(f"{where} has no {part!r}; {hint}")
        value = getattr(value, part)
    return value


def _offer(module: Any, where: str) -> str:
    mine = [
        n for n, v in vars(module).items()
        if not n.startswith("_") and getattr(v, "__module__", None) == module.__name__
    ]  # fmt: skip
    return f"it defines {', '.join(mine[:8])}" if mine else f"{where} defines nothing to use"


def user_workload(value: Any, where: str, options: ModelOptions) -> tuple[Workload, str]:
    """The workload that a name stands for, and its inputs in words.

    Raises:
        TargetError: the name is neither a workload, a module nor a function that makes one.
        WorkloadError: a bare model without ``--input``.
    """
    if isinstance(value, Workload):
        options.refuse(f"{where}, a Workload with inputs of its own", ())
        return value, ""
    if isinstance(value, nn.Module):
        return _bare(value, where, options)
    if not callable(value):
        raise TargetError(
            f"{where} is of type {type(value).__name__}; it must be a batchfit Workload, a "
            "torch.nn.Module, or a function that makes one of them"
        )
    needed = _required(value)
    if needed == ["device"]:
        options.refuse(f"{where}, a step function", ())
        return Workload.from_step(value, name=where), ""
    if needed:
        raise TargetError(
            f"{where} needs arguments ({', '.join(needed)}); name a function without arguments, as "
            "def make(): return Model(...), or def build(device) that returns step(batch)"
        )
    if options.input:
        return _bare(lambda: _expect_module(value(), where), where, options)
    made: list[Any] = []
    with torch.device("meta"):
        _guarded(where, lambda: made.append(value()), "raised")
    if isinstance(made[0], nn.Module):
        return _bare(value, where, options)
    if not isinstance(made[0], Workload):
        raise TargetError(
            f"{where} returned {type(made[0]).__name__}; it must return a batchfit Workload or a "
            "torch.nn.Module"
        )
    _guarded(where, lambda: made.append(value()), "raised")
    options.refuse(f"{where}, a Workload with inputs of its own", ())
    return made[1], ""


def _required(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature: call them and see
        return []
    return [
        p.name for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip


def _expect_module(value: Any, where: str) -> nn.Module:
    if isinstance(value, Workload):
        raise WorkloadError(f"{where} makes a Workload, which has inputs of its own; drop --input")
    if not isinstance(value, nn.Module):
        raise TargetError(
            f"{where} returned {type(value).__name__}; it must return a torch.nn.Module"
        )
    return value


def _bare(model: Any, where: str, options: ModelOptions) -> tuple[Workload, str]:
    options.refuse(f"the model {where}, which takes --input", ("input", "input_dtype"))
    if not options.input:
        raise WorkloadError(
            f"{where} is a model, and what it takes is not known; give the shape of one sample, as "
            "--input 3x224x224 or --input 128 --input-dtype int64"
        )
    inputs, words = shaped_inputs(options)
    return Workload(model=model, inputs=inputs), f"input {words}"


def shaped_inputs(options: ModelOptions) -> tuple[Callable[[int], Any], str]:
    """Inputs of the shapes and dtypes given, as a function of the batch size, and in words.

    Raises:
        WorkloadError: an unknown dtype, or not as many as there are shapes.
    """
    names = options.input_dtype or ("float32",)
    dtypes = []
    for name in names:
        dtype = getattr(torch, name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            close = difflib.get_close_matches(name, _DTYPES, 2) or _DTYPES
            raise WorkloadError(
                f"torch has no dtype {name!r}; write for example {', '.join(close)}"
            )
        dtypes.append(dtype)
    if len(dtypes) == 1:
        dtypes *= len(options.input)
    if len(dtypes) != len(options.input):
        raise WorkloadError(
            f"{len(options.input)} --input but {len(dtypes)} --input-dtype; give one dtype for all "
            "or one for each, in the same order"
        )
    pairs = list(zip(options.input, dtypes, strict=True))

    def inputs(batch: int) -> Any:
        made = tuple(torch.zeros(batch, *shape, dtype=dtype) for shape, dtype in pairs)
        return made[0] if len(made) == 1 else made

    words = ", ".join(
        "x".join(map(str, shape)) + ("" if dtype is torch.float32 else f" {str(dtype)[6:]}")
        for shape, dtype in pairs
    )
    return inputs, words
