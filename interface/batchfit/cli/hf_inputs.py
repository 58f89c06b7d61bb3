"""Batches for Hugging Face models: what a data collator gives for each task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchfit.estimator import TargetError, WorkloadError

Inputs = Callable[[int], dict[str, Any]]

_DEFAULT_LENGTH = 512
_AUDIO_SAMPLES = 16000 * 10  # ten seconds at 16 kHz, where the model does not say
_CTC_LABELS = 64
# Model types that keep places for padding in their table of positions.
_PADDED = ("roberta", "xlm-roberta", "camembert", "longformer", "xlm-roberta-xl", "mpnet")
# Positions that are computed, not looked up in a table: longer sequences run.
_COMPUTED = ("rope_parameters", "rope_theta", "rotary_dim", "alibi")


def text_length(config: Any, asked: int | None) -> int:
    """Tokens per sample: as asked, or 512, or what the model can take.

    Raises:
        WorkloadError: longer than the model's table of positions.
    """
    text = getattr(config, "text_config", config)
    places = getattr(text, "max_position_embeddings", None)
    if config.model_type == "whisper":
        places = config.max_target_positions
    if places is not None and config.model_type in _PADDED:
        places -= config.pad_token_id + 1
    if asked is None:
        return min(_DEFAULT_LENGTH, places or _DEFAULT_LENGTH)
    if places and asked > places and not any(getattr(text, n, None) for n in _COMPUTED):
        raise WorkloadError(
            f"a sequence length of {asked} is more than the {places} positions of this model; give "
            f"--sequence-length {places} or less"
        )
    return asked


# What a model computes its loss from.
_TARGETS = ("labels", "start_positions", "end_positions", "return_loss")


def inputs_for(task: str, config: Any, length: int, *, labels: bool = True) -> tuple[Inputs, str]:
    """The inputs of a task as a function of the batch size, and one sample's in words.

    Args:
        task: one of ``hf.TASKS``.
        config: the model's configuration.
        length: tokens per sample.
        labels: with what the loss is computed from.

    Raises:
        TargetError: a task whose inputs this model does not take.
    """
    made, words = _batches(task, config, length)
    if labels:
        return made, words

    def unlabelled(batch: int) -> dict[str, Any]:
        full = made(batch)
        if config.is_encoder_decoder and "labels" in full:
            full["decoder_input_ids"] = full["labels"]
        return {name: value for name, value in full.items() if name not in _TARGETS}

    return unlabelled, words


def _batches(task: str, config: Any, length: int) -> tuple[Inputs, str]:
    if task in ("speech-seq2seq", "ctc", "audio-classification"):
        return _audio(task, config, length)
    if task == "image-classification" or (task == "features" and _is_vision(config)):
        return _images(task, config)
    if task == "contrastive":
        return _pairs(config, length)
    return _text(task, config, length)


def _tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def _vocabulary(config: Any) -> int:
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise TargetError(
            f"{config.model_type} has no vocabulary to make tokens from; choose another --task, or "
            "give a workload of your own, as FILE.py:NAME"
        )
    return size


def _text(task: str, config: Any, length: int) -> tuple[Inputs, str]:
    vocabulary = _vocabulary(config)

    def inputs(batch: int) -> dict[str, Any]:
        ids = _tokens(batch, length, vocabulary)
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if task in ("causal-lm", "masked-lm", "seq2seq-lm"):
            made["labels"] = _tokens(batch, length, vocabulary)
        elif task == "sequence-classification":
            made["labels"] = torch.zeros(batch, dtype=torch.int64)
        elif task == "token-classification":
            made["labels"] = torch.zeros(batch, length, dtype=torch.int64)
        elif task == "question-answering":
            made["start_positions"] = made["end_positions"] = torch.zeros(batch, dtype=torch.int64)
        elif config.is_encoder_decoder:
            made["decoder_input_ids"] = _tokens(batch, length, vocabulary)
        return made

    return inputs, f"{length} tokens"


def _is_vision(config: Any) -> bool:
    return hasattr(config, "num_channels") and not hasattr(config, "vocab_size")


def _image_shape(config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    return getattr(config, "num_channels", 3), height, width


def _images(task: str, config: Any) -> tuple[Inputs, str]:
    shape = _image_shape(config)

    def inputs(batch: int) -> dict[str, Any]:
        made = {"pixel_values": torch.zeros(batch, *shape)}
        if task == "image-classification":
            made["labels"] = torch.zeros(batch, dtype=torch.int64)
        return made

    return inputs, "x".join(map(str, shape))


def _pairs(config: Any, length: int) -> tuple[Inputs, str]:
    if not hasattr(config, "text_config") or not hasattr(config, "vision_config"):
        raise TargetError(f"{config.model_type} has no text and image parts: choose another --task")
    shape = _image_shape(config.vision_config)
    vocabulary = _vocabulary(config.text_config)

    def inputs(batch: int) -> dict[str, Any]:
        ids = _tokens(batch, length, vocabulary)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.zeros(batch, *shape),
            "return_loss": True,
        }

    return inputs, f"{'x'.join(map(str, shape))} and {length} tokens"


def _audio(task: str, config: Any, length: int) -> tuple[Inputs, str]:
    if hasattr(config, "num_mel_bins"):
        # The encoder halves the frames of the spectrogram.
        shape: tuple[int, ...] = (
            config.num_mel_bins,
            2 * getattr(config, "max_source_positions", 1500),
        )
        name = "input_features"
    else:
        shape, name = (_AUDIO_SAMPLES,), "input_values"
    words = f"{name} of {'x'.join(map(str, shape))}"

    def inputs(batch: int) -> dict[str, Any]:
        made = {name: torch.zeros(batch, *shape)}
        if task == "speech-seq2seq":
            made["labels"] = _tokens(batch, length, _vocabulary(config))
        elif task == "ctc":
            made["labels"] = torch.ones(batch, _CTC_LABELS, dtype=torch.int64)
        else:
            made["labels"] = torch.zeros(batch, dtype=torch.int64)
        return made

    return inputs, f"{words}, {length} tokens" if task == "speech-seq2seq" else words
