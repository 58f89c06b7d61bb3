"""milabench (config/scaling/H100.yaml, March 2025): training loops of its torchvision and
Hugging Face benchmarks, by batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchfit.estimator import Workload

from .base import Job, Parts, Step
from .huggingface import token_ids
from .notebooks import images

GPU = "H100"
TRANSFORMERS = "transformers-4.48"


def _precision(name: str) -> torch.dtype | None:
    return torch.float16 if "fp16" in name else None


def _model(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)()
    return model.train()


def torchvision_loop(name: str, autocast: torch.dtype | None, channels_last: bool) -> Workload:
    """benchmarks/torchvision/main.py: SGD without momentum; backward and step under autocast."""

    def build(device: torch.device) -> Step:
        model = _model(name).to(device)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        criterion = nn.CrossEntropyLoss().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cuda", enabled=autocast is not None)
        layout = torch.channels_last if channels_last else torch.preserve_format
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            host = torch.empty(batch, 3, 224, 224)
            held["inp"] = host.to(
                device=device, dtype=autocast or torch.float32, memory_format=layout
            )
            held["target"] = torch.randint(0, 1000, (batch,)).to(device)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=autocast is not None):
                held["output"] = model(held["inp"])
                held["loss"] = criterion(held["output"], held["target"])
                scaler.scale(held["loss"]).backward()
                scaler.step(optimizer)
                scaler.update()

        return step

    return Workload.from_step(build, name=f"{name}, milabench")


Inputs = Callable[[int], dict[str, torch.Tensor]]


def huggingface_loop(
    make: Callable[[], nn.Module], inputs: Inputs, autocast: torch.dtype | None
) -> Workload:
    """benchmarks/huggingface: Adam, and nothing ever sets the gradients to zero."""

    def build(device: torch.device) -> Step:
        model = make().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        scaler = torch.amp.GradScaler("cuda", enabled=autocast is not None)
        held: dict[str, Any] = {}

        def one(data: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.float16, enabled=autocast is not None):
                outputs = model(**data)
            loss: torch.Tensor = outputs.loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        def step(batch: int) -> None:
            held["data"] = {k: v.to(device) for k, v in inputs(batch).items()}
            held["loss"] = one(held["data"])

        return step

    return Workload.from_step(build, name="milabench, Hugging Face")


def _from(auto: str, config: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, auto).from_config(config(transformers))
        return model  # from_config: train mode

    return make


def _tokens(length: int, vocabulary: int) -> Inputs:
    def inputs(batch: int) -> dict[str, torch.Tensor]:
        shape = (batch, length)
        return {name: torch.randint(0, vocabulary, shape) for name in ("input_ids", "labels")}

    return inputs


def _t5_small(library: Any) -> Any:
    return library.T5Config(
        d_model=512, d_ff=2048, d_kv=64, num_layers=6, num_heads=8, vocab_size=32128,
        decoder_start_token_id=0, n_positions=512, task_specific_params=None,
    )  # fmt: skip


def _whisper_tiny(library: Any) -> Any:
    return library.WhisperConfig(
        d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, vocab_size=51865,
    )  # fmt: skip


def _mel(batch: int) -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.empty(batch, 80, 3000), "labels": torch.randint(0, 2, (batch,))
    }  # fmt: skip


_MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "bert": (
        _from("AutoModelForMaskedLM", lambda library: library.BertConfig()), _tokens(512, 30522)
    ),
    "t5": (_from("AutoModelForSeq2SeqLM", _t5_small), _tokens(1024, 32128)),
    "whisper": (_from("AutoModelForAudioClassification", _whisper_tiny), _mel),
    "reformer": (
        _from("AutoModelForMaskedLM", lambda library: library.ReformerConfig(num_buckets=128)),
        _tokens(4096, 320),
    ),
}  # fmt: skip
JOBS: dict[str, Job] = {}


def _vision(row: str, name: str, precision: str, channels_last: bool = False) -> None:
    autocast = _precision(precision)
    JOBS[row] = Job(
        lambda: torchvision_loop(name, autocast, channels_last), 0, GPU,
        parts=lambda: Parts(
            lambda: _model(name), images(224), optimizer="sgd", autocast=autocast
        ),
    )  # fmt: skip


def _text(row: str, name: str, precision: str) -> None:
    autocast = _precision(precision)
    make, inputs = _MODELS[name]
    JOBS[row] = Job(
        lambda: huggingface_loop(make, inputs, autocast), 0, GPU, environment=TRANSFORMERS,
        parts=lambda: Parts(
            make, token_ids(512) if name == "bert" else inputs, optimizer="adam",
            autocast=autocast,
        ),
    )  # fmt: skip


for _p in ("fp16", "fp32", "tf32", "tf32-fp16"):
    _text(f"bert-{_p}", "bert", _p)
    _vision(f"convnext_large-{_p}", "convnext_large", _p)
_text("t5", "t5", "tf32-fp16")
_text("whisper", "whisper", "tf32-fp16")
_vision("regnet_y_128gf", "regnet_y_128gf", "tf32-fp16")
_vision("resnet50", "resnet50", "tf32-fp16", channels_last=True)
