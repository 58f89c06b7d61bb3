"""Targets of Hugging Face transformers: a configuration alone, never weights or remote code."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchfit.estimator import TargetError, Workload

from .hf_configs import bundled_config, bundled_ids
from .hf_inputs import inputs_for, text_length
from .options import ModelOptions

#: task -> (transformers' class, its table of class names, options that apply)
_TEXT = ("sequence_length",)
_HEAD = ("num_classes",)
_IMAGE = ("image_size", "channels")
TASKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM", _TEXT),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM", _TEXT),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", _TEXT),
    "sequence-classification": (
        "AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION", _TEXT + _HEAD,
    ),
    "token-classification": (
        "AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION", _TEXT + _HEAD,
    ),
    "question-answering": (
        "AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING", _TEXT,
    ),
    "image-classification": (
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION", _IMAGE + _HEAD,
    ),
    "speech-seq2seq": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ", _TEXT),
    "ctc": ("AutoModelForCTC", "MODEL_FOR_CTC", _TEXT),
    "audio-classification": (
        "AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION", _TEXT + _HEAD,
    ),
    "contrastive": (
        "AutoModelForZeroShotImageClassification", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
        (*_TEXT, "image_size"),
    ),
    "features": ("AutoModel", "MODEL", _TEXT + _IMAGE),
}  # fmt: skip

# Which of several tasks a class that names none is trained for most, in this order.
_PREFERENCE = (
    "contrastive", "speech-seq2seq", "seq2seq-lm", "masked-lm", "causal-lm",
    "image-classification", "audio-classification", "features",
)  # fmt: skip


def hf_workload(
    name: str, options: ModelOptions, *, training: bool = True
) -> tuple[Workload, str, tuple[str, ...]]:
    """The workload of a configuration, its inputs in words, and notes.

    Args:
        name: a folder, a file or a model id.
        options: what the command line says about the model.
        training: with labels, so that the model computes its loss.

    Raises:
        TargetError: no such configuration, or one whose class transformers does not have.
        WorkloadError: options that the model cannot take.
    """
    import transformers

    values = find_config(name)
    kind = str(values["model_type"])
    if kind not in transformers.CONFIG_MAPPING:
        needs = "its own code, which is never run" if "auto_map" in values else "another version"
        raise TargetError(
            f"hf:{name} is of type {kind!r}, which transformers {transformers.__version__} lacks "
            f"(it needs {needs}); give a workload of your own, as FILE.py:NAME"
        )
    config = transformers.CONFIG_MAPPING[kind].from_dict(values)
    task, notes = _task(config, options)
    class_name, _, allowed = TASKS[task]
    always = ("task", "attn_implementation")
    options.refuse(f"hf:{name} with --task {task}", always + allowed)
    _apply(config, options)
    auto = getattr(transformers, class_name)
    if type(config) not in auto._model_mapping:
        raise TargetError(f"transformers has no {class_name} for {kind}; choose another --task")
    length = text_length(config, options.sequence_length) if "sequence_length" in allowed else 0
    inputs, words = inputs_for(task, config, length, labels=training)
    if training and getattr(config, "use_cache", False) and task in ("causal-lm", "seq2seq-lm"):
        notes.append(
            "use_cache is on, as in the configuration; a training loop that switches it off "
            "does not keep keys and values"
        )
    arguments: dict[str, Any] = {"dtype": torch.float32}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation

    def build() -> nn.Module:
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        model: nn.Module = auto.from_config(config, trust_remote_code=False, **arguments)
        return model

    loss = "mean" if task == "features" else "model"
    if str((config.architectures or [""])[0]).endswith("WithTeacher"):
        loss = "cross_entropy"  # made for inference, it computes none
    if task == "features":
        notes.append("this configuration names no task: the loss is the mean of the features")
    words = f"{task}, {words}"
    return Workload(model=build, inputs=inputs, loss=loss, name=f"hf:{name}"), words, tuple(notes)


def _task(config: Any, options: ModelOptions) -> tuple[str, list[str]]:
    """The task that the user or the configuration names; else one that the model can do."""
    from transformers.models.auto import modeling_auto

    if options.task is not None:
        return options.task, []
    named = (config.architectures or [""])[0]
    fits: list[str] = []
    for task, (_, table, _) in TASKS.items():
        classes = getattr(modeling_auto, f"{table}_MAPPING_NAMES")
        own = classes.get(config.model_type)
        if own is None:
            continue
        if named in ((own,) if isinstance(own, str) else own) and task != "features":
            return task, []
        fits.append(task)
    for task in _PREFERENCE:
        if task in fits:
            said = (
                f"{named} has no loss of its own" if named else "the configuration names no class"
            )
            return task, [f"{said}: taken as {task}; --task says otherwise"]
    raise TargetError(
        f"{named or config.model_type} is for none of the tasks that batchfit knows inputs for "
        f"({', '.join(TASKS)}); give a workload of your own, as FILE.py:NAME"
    )


def _apply(config: Any, options: ModelOptions) -> None:
    if options.num_classes is not None:
        config.num_labels = options.num_classes
    vision = getattr(config, "vision_config", config)
    if options.image_size is not None:
        height, width = options.image_size
        vision.image_size = height if height == width else [height, width]
    if options.channels is not None:
        vision.num_channels = options.channels


def find_config(name: str) -> dict[str, Any]:
    """The configuration of a folder, a file, the cache, one that ships with batchfit, or the hub.

    Raises:
        TargetError: it is in none of these.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return _read(path / "config.json" if path.is_dir() else path, name)
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise TargetError(f"no folder or file {name!r} with a model's config.json")
    found = _download(name, local=True)
    if isinstance(found, Path):
        return _read(found, name)
    shipped = bundled_config(name)
    if shipped is not None:
        return shipped
    found = _download(name, local=False)
    if isinstance(found, Path):
        return _read(found, name)
    close = difflib.get_close_matches(name.lower(), {i.lower(): i for i in bundled_ids()}, 3, 0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise TargetError(
        f"no configuration for {name!r}: it is neither a folder nor in the Hugging Face cache, and "
        f"the hub {found}; {hint}{len(bundled_ids())} configurations ship with batchfit, as "
        f"{', '.join(bundled_ids()[:3])}"
    )


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TargetError(f"the folder {name!r} has no config.json") from None
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise TargetError(f"{path} is not a transformers configuration: it has no model_type")
    return values


def _download(name: str, *, local: bool) -> Path | str:
    """config.json from the cache or the hub, or why there is none."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        if not local:
            if constants.HF_HUB_OFFLINE:
                return "is switched off (HF_HUB_OFFLINE)"
            # Fails at once where there is no network; hf_hub_download tries for half a minute.
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
        return Path(hf_hub_download(name, "config.json", local_files_only=local))
    except errors.HFValidationError:
        return "takes ids of the form owner/name only"
    except errors.GatedRepoError:
        return "lets only some accounts see it: log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        return "has no such public model"
    except errors.LocalEntryNotFoundError:
        return "cannot be reached from here"
    except errors.EntryNotFoundError:
        return "has that model, but without a config.json"
    except Exception as error:  # whatever the network library of the day raises
        return f"cannot be reached from here ({type(error).__name__})"
