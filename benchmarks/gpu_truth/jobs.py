"""The jobs: the same object is predicted without a GPU and run on one.

The order is that in which they are run, the most telling and the most different ones first: where
the time ends, the last ones are left out. What is allocated does not depend on the inputs' values,
with one exception: under GradScaler a step whose gradients overflow is not taken, and makes no
optimizer state. So images are noise (constant ones have no variance, and batch norm's gradients
explode), and token numbers are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from batchfit.estimator import Workload

from . import convnets, text, vision

Inputs = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the benchmark.

    Attributes:
        name: what it is called in the table.
        family: rows are summed up by it.
        make: the workload.
        batches: three batch sizes; the last takes a few GiB.
        convolutions: whether cuDNN's workspaces are looked into.
        package: an optional package that it needs; "" for none but torch.
    """

    name: str
    family: str
    make: Callable[[], Workload]
    batches: tuple[int, int, int]
    convolutions: bool = False
    package: str = ""

    def missing(self, capability: tuple[int, int]) -> str:
        """Why it cannot run here; "" if it can.

        bfloat16 has no kernels of its own below capability 8.0 (CUDA C++ Programming Guide,
        arithmetic instructions): emulated ones allocate differently.
        """
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if "bf16" in self.make().precision and capability < (8, 0):
            return "bf16 needs compute capability 8.0"
        return ""


def images(side: int) -> Inputs:
    return lambda b: torch.rand(b, 3, side, side)


def tokens(length: int, vocabulary: int = 256) -> Inputs:
    """Token numbers 1, 2, ..., below the vocabulary."""
    return lambda b: (torch.arange(b * length) % (vocabulary - 1) + 1).view(b, length)


def labelled(length: int) -> Inputs:
    """What Hugging Face models take to return a loss."""

    def make(batch: int) -> dict[str, Tensor]:
        ids = tokens(length)(batch)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def _boxes(batch: int) -> tuple[Tensor, ...]:
    matched = torch.arange(32).expand(batch, -1).contiguous()
    return torch.rand(batch, 3, 512, 512), matched, torch.zeros(batch, 32, 4)


def _padded(batch: int) -> tuple[Tensor, Tensor]:
    ids = tokens(256)(batch)
    padding = torch.zeros(batch, 256, dtype=torch.bool)
    padding[:, 200:] = True
    return ids, padding


def _steps(batch: int) -> tuple[Tensor, Tensor]:
    return torch.rand(batch, 3, 64, 64), torch.zeros(batch)


def _clicks(batch: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, 13), (torch.arange(batch * 16 * 8) % 99_991).view(batch, 16, 8)


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 10))


def gan() -> Workload:
    """DCGAN's tutorial: two networks and two optimizers, real and generated images in turn."""

    def build(device: torch.device) -> Callable[[int], None]:
        make: list[nn.Module] = [nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False)]
        tell: list[nn.Module] = [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
        for width in (512, 256, 128):
            make += [nn.BatchNorm2d(width), nn.ReLU(True)]
            make.append(nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False))
        for width in (64, 128, 256):
            tell.append(nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False))
            tell += [nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2, True)]
        make += [nn.BatchNorm2d(64), nn.ReLU(True), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()]
        tell.append(nn.Conv2d(512, 1, 4))
        generator = nn.Sequential(*make).to(device)
        critic = nn.Sequential(*tell).to(device)
        one = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
        two = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
        criterion = nn.BCEWithLogitsLoss()

        def step(batch: int) -> None:
            real = torch.rand(batch, 3, 64, 64).to(device)
            label = torch.ones(batch, device=device)
            critic.zero_grad()
            criterion(critic(real).view(-1), label).backward()
            noise = torch.randn(batch, 100, 1, 1, device=device)
            fake = generator(noise)
            criterion(critic(fake.detach()).view(-1), 1 - label).backward()
            two.step()
            generator.zero_grad()
            criterion(critic(fake).view(-1), label).backward()
            one.step()

        return step

    return Workload.from_step(build, name="DCGAN")


def classifier(
    model: Callable[[], nn.Module], side: int = 224, **settings: Any
) -> Callable[[], Workload]:
    """Cross-entropy over the classes of square images."""
    return lambda: Workload(model=model, inputs=images(side), loss="cross_entropy", **settings)


def causal(length: int, settings: dict[str, Any], **model: Any) -> Callable[[], Workload]:
    """A GPT-2 that predicts words."""
    return lambda: Workload(
        model=lambda: text.GPT(length=length, **model), inputs=tokens(length),
        loss="cross_entropy", **settings,
    )  # fmt: skip


def sequence(
    model: Callable[[], nn.Module], inputs: Inputs, **settings: Any
) -> Callable[[], Workload]:
    """Any other model."""
    return lambda: Workload(model=model, inputs=inputs, **settings)


def torchvision_model(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, weights=None)
        return model

    return make


def transformers_model(family: str, kind: str, **config: Any) -> Callable[[], nn.Module]:
    """A Hugging Face model from its configuration, with new weights."""

    def make() -> nn.Module:
        import transformers

        settings = getattr(transformers, f"{family}Config")(**config)
        model: nn.Module = getattr(transformers, f"{family}{kind}")(settings)
        return model

    return make


LLAMA: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
FUSED: dict[str, Any] = {"optimizer": ("adamw", {"fused": True})}
SGD: dict[str, Any] = {"optimizer": "sgd:momentum=0.9,lr=0.001"}

JOBS: tuple[Job, ...] = (
    Job("resnet50 amp channels_last", "CNN",
        classifier(convnets.ResNet, precision="amp-fp16", memory_format="channels_last", **SGD),
        (8, 32, 96), True),
    Job("gpt2 bf16 autocast", "GPT", causal(1024, {"precision": "amp-bf16"}), (1, 2, 6)),
    Job("vit_b16 fp32", "ViT", classifier(vision.ViT), (4, 16, 40)),
    Job("resnet50 fp32", "CNN", classifier(convnets.ResNet), (4, 16, 48), True),
    Job("bert fp32", "BERT", sequence(text.MaskedEncoder, _padded, loss="cross_entropy"),
        (2, 8, 24)),
    Job("unet amp", "UNet", sequence(convnets.UNet, images(256), loss="cross_entropy",
        precision="amp-fp16", optimizer="adam"), (2, 6, 16), True),
    Job("llama lora bf16", "Llama",
        sequence(text.LlamaLora, tokens(1024), loss="cross_entropy", precision="bf16"), (1, 3, 6)),
    Job("lstm fp32", "RNN", sequence(lambda: text.Recurrent("lstm"), tokens(35),
        loss="cross_entropy", optimizer="adam", clip_grad_norm=0.25), (20, 80, 240)),
    Job("gpt2 eager fp32", "GPT", causal(512, {}, eager=True), (1, 2, 5)),
    Job("convnext amp channels_last", "CNN",
        classifier(convnets.convnext, precision="amp-fp16", memory_format="channels_last"),
        (8, 24, 64), True),
    Job("mlp fp32 sgd", "MLP", sequence(mlp, lambda b: torch.zeros(b, 4096),
        loss="cross_entropy", optimizer="sgd:momentum=0,lr=0.001"), (512, 4096, 24576)),
    Job("swin amp", "Swin", classifier(vision.Swin, precision="amp-fp16"), (4, 16, 48)),
    Job("detector fp32", "detection",
        sequence(vision.Detector, _boxes, loss="model", **SGD), (1, 3, 8), True),
    Job("efficientnet_b0 amp", "CNN",
        classifier(convnets.efficientnet_b0, precision="amp-fp16"), (8, 32, 96), True),
    Job("gpt2 bf16 fused", "GPT", causal(1024, {"precision": "bf16", **FUSED}), (1, 3, 8)),
    Job("vit_b16 amp accumulate clip", "ViT",
        classifier(vision.ViT, precision="amp-fp16", accumulate=3, clip_grad_norm=1.0),
        (8, 24, 64)),
    Job("gru amp", "RNN", sequence(lambda: text.Recurrent("gru"), tokens(35),
        loss="cross_entropy", precision="amp-fp16"), (20, 128, 400)),
    Job("gpt2 checkpointed amp", "GPT",
        causal(1024, {"precision": "amp-fp16", **FUSED}, checkpointing=True), (1, 3, 8)),
    Job("diffusion unet bf16 autocast", "UNet",
        sequence(vision.DiffusionUNet, _steps, loss="mse", precision="amp-bf16", ema=True),
        (4, 16, 48), True),
    Job("recommender fp32", "embeddings", sequence(text.Recommender, _clicks,
        loss="bce_with_logits", optimizer="adagrad"), (4096, 32768, 131072)),
    Job("big vocabulary bf16 autocast", "GPT", sequence(text.BigVocabulary, tokens(512),
        loss="cross_entropy", precision="amp-bf16"), (1, 4, 8)),
    Job("dcgan fp32", "GAN", gan, (32, 256, 1024), True),
    Job("resnet50 checkpointed fp32", "CNN",
        classifier(lambda: convnets.ResNet(checkpointing=True), set_to_none=False, **SGD),
        (8, 32, 96), True),
    Job("video resnet amp", "video", sequence(convnets.video_resnet,
        lambda b: torch.rand(b, 3, 16, 112, 112), loss="cross_entropy", precision="amp-fp16",
        **SGD), (2, 8, 24), True),
    Job("translator fp32", "BERT", sequence(text.Translator,
        lambda b: (tokens(128)(b), tokens(128)(b)), loss="mean", optimizer="adam"), (4, 16, 48)),
    Job("speech encoder amp", "speech", sequence(convnets.SpeechEncoder,
        lambda b: torch.rand(b, 80_000), loss="cross_entropy", precision="amp-fp16"),
        (2, 6, 16), True),
    Job("graph net fp32", "graph", sequence(text.GraphNet, lambda b: torch.zeros(b, 2048, 32),
        loss="cross_entropy", optimizer="adam"), (2, 8, 24)),
    Job("vit_b16 evaluate sgd", "ViT", classifier(vision.ViT, evaluate=True, **SGD), (4, 16, 40)),
    Job("gpt2 inference bf16", "GPT", causal(1024, {"precision": "bf16", "inference": True}),
        (1, 4, 16)),
    Job("hf gpt2 bf16 autocast", "Hugging Face", sequence(
        transformers_model("GPT2", "LMHeadModel"), labelled(512), precision="amp-bf16",
        keep_outputs=False), (1, 3, 7), package="transformers"),
    Job("hf bert fp32", "Hugging Face", sequence(
        transformers_model("Bert", "ForMaskedLM"), labelled(256)), (2, 8, 24),
        package="transformers"),
    Job("hf llama bf16", "Hugging Face", sequence(
        transformers_model("Llama", "ForCausalLM", **LLAMA), labelled(512), precision="bf16",
        checkpointing=True, **FUSED), (1, 4, 16), package="transformers"),
    Job("torchvision mobilenet_v3 amp", "CNN", classifier(
        torchvision_model("mobilenet_v3_large"), precision="amp-fp16"), (16, 64, 192), True,
        package="torchvision"),
    Job("torchvision densenet121 fp32", "CNN", classifier(
        torchvision_model("densenet121"), **SGD), (4, 16, 40), True, package="torchvision"),
    Job("torchvision swin_t amp", "Swin", classifier(
        torchvision_model("swin_t"), precision="amp-fp16"), (4, 16, 48), package="torchvision"),
)  # fmt: skip


def find_job(name: str) -> Job:
    """The job of this name.

    Raises:
        KeyError: there is none.
    """
    return {job.name: job for job in JOBS}[name]
