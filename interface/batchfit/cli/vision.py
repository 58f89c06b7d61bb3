"""Targets of torchvision and timm. Weights are never asked for."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from batchfit.estimator import TargetError, Workload, WorkloadError

from .files import shaped_inputs
from .options import ModelOptions

_OPTIONS = ("image_size", "num_classes", "input", "input_dtype")

# Frames of a clip where a model does not say: what the kinetics recipes of torchvision train on.
_FRAMES = 16
_SIZE = 224

_UNUSABLE = {
    "detection": "its loss depends on the boxes in the data, so its memory cannot be known without "
    "data; give a workload of your own, as FILE.py:NAME, that trains what you need of it",
    "quantization": "it is quantized for inference on CPUs; take the float model of that name",
    "optical_flow": "it takes pairs of frames and has no standard loss; give a workload of your "
    "own, as FILE.py:NAME",
}


def unknown_model(library: str, name: str, names: list[str]) -> TargetError:
    """The error for a name that a library does not have."""
    close = difflib.get_close_matches(name.lower(), names, 3, 0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {len(names)} others"
    return TargetError(f"{library} has no model {name!r}; {hint}")


def _torchvision_models() -> Any:
    """torchvision's models; it is built for one version of torch, and says so in its own way."""
    try:
        from torchvision import models
    except RuntimeError as error:
        raise TargetError(
            f"the installed torchvision does not go with torch {torch.__version__} ({error}); "
            "install both from the same place, as `pip install torch torchvision` does"
        ) from error
    return models


def _images(shape: tuple[int, ...], options: ModelOptions) -> tuple[Callable[[int], Any], str]:
    if options.input:
        return shaped_inputs(options)
    return shaped_inputs(ModelOptions(input=(shape,)))


def torchvision_workload(name: str, options: ModelOptions) -> tuple[Workload, str]:
    """The workload of a torchvision model, and its inputs in words.

    Raises:
        TargetError: no such model, or one that cannot be trained on made-up data.
    """
    models = _torchvision_models()
    options.refuse(f"torchvision:{name}", _OPTIONS)
    kind = next(
        (
            kind for kind in ("detection", "quantization", "optical_flow", "segmentation", "video")
            if name in models.list_models(getattr(models, kind))
        ),
        "classification",
    )  # fmt: skip
    if kind in _UNUSABLE:
        raise TargetError(f"torchvision:{name} cannot be estimated: {_UNUSABLE[kind]}")
    usable = [
        n for n in models.list_models()
        if not any(n in models.list_models(getattr(models, k)) for k in _UNUSABLE)
    ]  # fmt: skip
    if name not in usable:
        raise unknown_model("torchvision", name, usable)
    size = options.image_size or _default_size(models.get_model_weights(name))
    shape: tuple[int, ...] = (3, *size)
    if kind == "video":
        meta = next(iter(models.get_model_weights(name))).meta
        shape = (3, max(_FRAMES, meta.get("min_temporal_size") or 0), *size)
    builder = models.get_model_builder(name)
    arguments = _arguments(builder, name, options, size)
    inputs, words = _images(shape, options)
    return (
        Workload(model=lambda: builder(weights=None, **arguments), inputs=inputs,
                 loss="cross_entropy", name=f"torchvision:{name}"),
        words,
    )  # fmt: skip


def _default_size(weights: Any) -> tuple[int, int]:
    """(height, width) that the default weights were evaluated at; nothing is downloaded."""
    best = getattr(weights, "DEFAULT", None) or next(iter(weights), None)
    preset = best.transforms() if best is not None else None
    size = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None) or [_SIZE]
    return (size[0], size[-1])


def _arguments(
    builder: Any, name: str, options: ModelOptions, size: tuple[int, int]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if options.num_classes is not None:
        arguments["num_classes"] = options.num_classes
    if "weights_backbone" in inspect.signature(builder).parameters:
        arguments["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        arguments["init_weights"] = False  # or both warn that the default will change
    if name.startswith("vit_"):
        if size[0] != size[1]:
            raise WorkloadError(f"torchvision:{name} takes square images, not {size[0]}x{size[1]}")
        arguments["image_size"] = size[0]
    if name.startswith("maxvit"):
        arguments["input_size"] = size
    if name.startswith("mvit") and size != (_SIZE, _SIZE):
        raise WorkloadError(f"torchvision:{name} takes frames of {_SIZE}x{_SIZE} only")
    return arguments


def timm_workload(name: str, options: ModelOptions) -> tuple[Workload, str]:
    """The workload of a timm model, and its inputs in words.

    Raises:
        TargetError: no such model, or no such pretrained tag.
    """
    import timm

    options.refuse(f"timm:{name}", ("channels", *_OPTIONS))
    if not timm.is_model(name):
        raise unknown_model("timm", name, timm.list_models())
    base, _, tag = name.partition(".")
    tags = [n.partition(".")[2] for n in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise TargetError(
            f"timm's {base} has no tag {tag!r}; it has {', '.join(tags)}, or leave it out"
        )
    configuration = timm.get_pretrained_cfg(name)
    channels, *size = configuration.input_size if configuration else (3, _SIZE, _SIZE)
    arguments: dict[str, Any] = {}
    if options.image_size is not None:
        size = list(options.image_size)
        if configuration is not None and configuration.fixed_input_size:
            arguments["img_size"] = options.image_size
    if options.channels is not None:
        channels = arguments["in_chans"] = options.channels
    if options.num_classes is not None:
        arguments["num_classes"] = options.num_classes
    inputs, words = _images((channels, *size), options)

    def build() -> torch.nn.Module:
        model: torch.nn.Module = timm.create_model(name, pretrained=False, **arguments)
        return model

    return (
        Workload(model=build, inputs=inputs, loss="cross_entropy", name=f"timm:{name}"),
        words,
    )
