"""The options of the commands. Nothing here imports torch, so that ``--help`` is quick."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

# As in batchfit.estimator, which is not imported here (it loads torch); a test compares them.
PRECISIONS = ("fp32", "tf32", "amp-fp16", "amp-bf16", "bf16", "fp16")
MEMORY_FORMATS = ("contiguous", "channels_last")
LOSSES = ("cross_entropy", "mse", "l1", "smooth_l1", "bce_with_logits", "sum", "mean", "model")
ATTENTION = ("flash", "efficient", "cudnn", "math")
TASKS = (
    "causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "token-classification",
    "question-answering", "image-classification", "speech-seq2seq", "ctc", "audio-classification",
    "contrastive", "features",
)  # fmt: skip

#: Options that are attributes of a Workload.
WORKLOAD_OPTIONS = (
    "precision", "optimizer", "loss", "memory_format", "checkpointing", "accumulate", "set_to_none",
    "clip_grad_norm", "ema", "evaluate", "inference", "keep_outputs",
)  # fmt: skip

_F = TypeVar("_F", bound=Callable[..., Any])
_SEPARATORS = re.compile(r"[xX,*]")


def _read_shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in _SEPARATORS.split(text)]
    if not all(part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r} is not a shape; write for example 3x224x224")
    return tuple(int(part) for part in parts)


def _shapes(_: Any, __: Any, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(_read_shape(text) for text in texts)


def _image_size(_: Any, __: Any, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    size = _read_shape(text)
    if len(size) > 2:
        raise click.BadParameter(f"{text!r} is not an image size; write 224 or 480x640")
    return size if len(size) == 2 else size * 2


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What the command line says about the model and its inputs; None or empty where it is silent.

    Attributes:
        image_size: (height, width).
        channels: of images.
        sequence_length: tokens per sample.
        num_classes: outputs of a classification head.
        task: which head of a Hugging Face model, and which loss.
        attn_implementation: transformers' ``attn_implementation``.
        input: shapes of one sample, one per argument of ``forward``.
        input_dtype: their dtypes; one for all, or one each.
    """

    image_size: tuple[int, int] | None = None
    channels: int | None = None
    sequence_length: int | None = None
    num_classes: int | None = None
    task: str | None = None
    attn_implementation: str | None = None
    input: tuple[tuple[int, ...], ...] = ()
    input_dtype: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: dict[str, Any]) -> ModelOptions:
        """Those of the options given that are about the model."""
        return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})

    def refuse(self, what: str, allowed: tuple[str, ...]) -> None:
        """Reject options that would have no effect: silence would be a wrong answer.

        Raises:
            click.UsageError: an option was given that does not apply to this target.
        """
        for item in fields(self):
            if getattr(self, item.name) not in (None, ()) and item.name not in allowed:
                usable = ", ".join(_flag(name) for name in allowed) or "none"
                raise click.UsageError(
                    f"{_flag(item.name)} has no effect on {what}; what does: " + usable
                )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_ALLOCATOR = click.option(
    "--allocator", metavar="SETTINGS",
    help="The allocator's settings, written as in PYTORCH_ALLOC_CONF: expandable_segments:True.  "
    "[default: those of the environment]",
)  # fmt: skip

AS_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object (docs/json.md)."
)
_ATTENTION = click.option(
    "--attention", type=click.Choice(ATTENTION),
    help="Attention kernel to prefer.  [default: CUDA's choice]",
)  # fmt: skip

#: Which batch sizes are taken for an answer.
CANDIDATES_GROUP = (
    click.option("--power-of-two", is_flag=True, help="Only powers of two as answer."),
    click.option(
        "--multiple-of", type=int, metavar="N", default=1, help="Only multiples of N as answer.",
    ),
)  # fmt: skip

#: One batch size on one GPU, for the commands that look at that.
_BATCH = click.option("--batch", type=int, metavar="N", required=True, help="The batch size.")
_GPU = click.option(
    "--gpu", metavar="NAME",
    help="The GPU, as rtx-3090 or a100-80gb; see `batchfit gpus`.  [default: A100 80GB]",
)  # fmt: skip

_ANSWER = (
    click.option(
        "--batch", multiple=True, type=int, metavar="N",
        help="A batch size to report on; repeatable.",
    ),
    click.option(
        "--gpu", multiple=True, metavar="NAME",
        help="A GPU, as rtx-3090 or a100-80gb; repeatable, one column each. See `batchfit gpus`.",
    ),
    click.option(
        "--budget", metavar="SIZE",
        help="What PyTorch may allocate, as 22GiB; instead of the GPU's own budget.",
    ),
    click.option(
        "--margin", metavar="SIZE", help="Memory of the GPU to keep free.  [default: 256MiB]",
    ),
    *CANDIDATES_GROUP,
    click.option(
        "--max-batch", type=int, metavar="N",
        help="Never answer more than N, for example the size of the dataset.",
    ),
    _ALLOCATOR,
    click.option("--layers", is_flag=True, help="Also print the layer tree and the module table."),
    AS_JSON,
)  # fmt: skip

_SNAPSHOT = (
    _BATCH,
    click.option(
        "-o", "--output", metavar="FILE", help="Write the predicted snapshot to this file.",
    ),
    click.option("--force", is_flag=True, help="Overwrite FILE."),
    click.option(
        "--compare", metavar="FILE",
        help="Compare with a real snapshot instead: a file of torch.cuda.memory._dump_snapshot.",
    ),
    click.option(
        "--json", "as_json", is_flag=True,
        help="Print the comparison as one JSON object (docs/json.md).",
    ),
    _GPU,
    _ALLOCATOR,
)  # fmt: skip

_EXPLAIN = (_BATCH, _GPU, _ALLOCATOR, AS_JSON)

WORKLOAD_GROUP = (
    click.option(
        "--precision", type=click.Choice(PRECISIONS), help="Numeric precision.  [default: fp32]",
    ),
    click.option(
        "--optimizer", metavar="NAME[:K=V,...]",
        help="Of torch.optim, as sgd:momentum=0; or none.  [default: adamw]",
    ),
    click.option(
        "--loss", type=click.Choice(LOSSES), metavar="NAME",
        help=f"One of {', '.join(LOSSES[:-1])}; or model, the loss that the model returns.  "
        "[default: model where it returns one, else cross_entropy]",
    ),
    click.option(
        "--memory-format", type=click.Choice(MEMORY_FORMATS),
        help="Memory format of weights and images.  [default: contiguous]",
    ),
    click.option("--checkpointing", is_flag=True, help="Use the model's gradient checkpointing."),
    click.option(
        "--accumulate", type=int, metavar="N",
        help="Micro-batches per optimizer step; --batch is the micro-batch.  [default: 1]",
    ),
    click.option(
        "--set-to-none/--no-set-to-none", default=True, help="As in optimizer.zero_grad.",
    ),
    click.option(
        "--clip-grad-norm", type=float, metavar="NORM", help="Clip gradients to this norm.",
    ),
    click.option("--ema", is_flag=True, help="Keep a moving average of the weights on the GPU."),
    click.option(
        "--keep-outputs/--no-keep-outputs", default=True,
        help="Outputs stay alive until the next step, as in a plain loop; not in HF's Trainer.",
    ),
    click.option("--evaluate", is_flag=True, help="An evaluation pass follows each step."),
    click.option("--inference", is_flag=True, help="No training: no gradients, no optimizer."),
)  # fmt: skip

MODEL_GROUP = (
    click.option("--image-size", callback=_image_size, metavar="N|HxW", help="Size of images."),
    click.option("--channels", type=click.IntRange(1), metavar="N", help="Channels of images."),
    click.option(
        "--sequence-length", type=click.IntRange(1), metavar="N",
        help="Tokens per sample.  [default: 512, or what the model can take]",
    ),
    click.option(
        "--num-classes", type=click.IntRange(1), metavar="N", help="Classes of the head.",
    ),
    click.option(
        "--task", type=click.Choice(TASKS), metavar="NAME",
        help=f"Head and loss of an hf: model, one of {', '.join(TASKS)}.  [default: as its "
        "configuration says]",
    ),
    click.option(
        "--attn-implementation", type=click.Choice(("eager", "sdpa")),
        help="Attention code of an hf: model.  [default: transformers' choice]",
    ),
    click.option(
        "--input", multiple=True, callback=_shapes, metavar="SHAPE",
        help="Shape of one sample, as 3x224x224; repeatable, one per argument of the model.",
    ),
    click.option(
        "--input-dtype", multiple=True, metavar="DTYPE",
        help="Dtype of --input, as int64; repeatable.  [default: float32]",
    ),
)  # fmt: skip


def estimate_options(command: _F) -> _F:
    """All options of ``batchfit estimate``."""
    for option in reversed((*_ANSWER, *WORKLOAD_GROUP, _ATTENTION, *MODEL_GROUP)):
        command = option(command)
    return command


def snapshot_options(command: _F) -> _F:
    """All options of ``batchfit snapshot``."""
    for option in reversed((*_SNAPSHOT, *WORKLOAD_GROUP, _ATTENTION, *MODEL_GROUP)):
        command = option(command)
    return command


def explain_options(command: _F) -> _F:
    """All options of ``batchfit explain``."""
    for option in reversed((*_EXPLAIN, *WORKLOAD_GROUP, _ATTENTION, *MODEL_GROUP)):
        command = option(command)
    return command


def gpus_options(command: _F) -> _F:
    """All options of ``batchfit gpus``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)
