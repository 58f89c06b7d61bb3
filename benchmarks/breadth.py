"""Which public models can be traced? Writes a table with one row per model.

    python benchmarks/breadth.py [--family torchvision|timm|hf|all] [--out breadth.json]

For each model both traces are made at a small image size where the model allows it, with AMP and
AdamW. A row says "ok", or the error of ours that ended it; any other exception is a failure of
batchfit. Rows that are in the output file already are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from batchfit.estimator import BatchfitError, Workload, estimate

Job = tuple[str, Callable[[], Workload]]


def image_job(name: str, make: Callable[[], torch.nn.Module], *shape: int) -> Job:
    def workload() -> Workload:
        return Workload(
            model=make,
            inputs=lambda b: torch.empty(b, *shape),
            precision="amp-fp16",
            name=name,
        )

    return name, workload


def torchvision_jobs() -> Iterator[Job]:
    import torchvision.models as models

    for module, shape in (
        (models, (3, 224, 224)),
        (models.segmentation, (3, 224, 224)),
        (models.video, (3, 16, 224, 224)),
    ):
        for name in models.list_models(module=module):
            size = (3, 299, 299) if "inception" in name else shape
            extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            if module is models.segmentation:
                extra = {"weights_backbone": None}

            def make(name: str = name, extra: dict[str, object] = extra) -> torch.nn.Module:
                return models.get_model(name, weights=None, **extra)

            yield image_job(f"torchvision:{name}", make, *size)


def timm_jobs(count: int = 200) -> Iterator[Job]:
    import timm

    families: dict[str, list[str]] = {}
    for name in timm.list_models():
        entry = timm.models.model_entrypoint(name)
        families.setdefault(entry.__module__.rsplit(".", 1)[-1], []).append(name)
    chosen: list[str] = []
    depth = 0
    while len(chosen) < count:  # one of each family, then a second, and so on
        round_ = [names[depth] for names in families.values() if depth < len(names)]
        chosen += round_[: count - len(chosen)]
        depth += 1
    for name in chosen:
        config = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
        size = config.input_size if config is not None else (3, 224, 224)

        def make(name: str = name) -> torch.nn.Module:
            return timm.create_model(name, pretrained=False)

        yield image_job(f"timm:{name}", make, *size)


# Small sizes for configurations; names that a class does not know are ignored by it.
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128, "n_embd": 64,
    "n_layer": 2, "n_head": 4, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "dim": 64,
    "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "head_dim": 16, "embedding_size": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_positions": 128, "ffn_dim": 128,
    "word_embed_proj_dim": 64, "rotary_dim": 8, "decoder_vocab_size": 512, "image_size": 64,
    "num_labels": 10,
}  # fmt: skip

CAUSAL = (
    "gpt2 gptj gpt_neo gpt_neox gpt_bigcode opt bloom llama mistral qwen2 qwen3 gemma gemma2 phi "
    "phi3 falcon mpt stablelm olmo cohere codegen biogpt starcoder2 mixtral granite"
).split()
MASKED = (
    "bert roberta distilbert albert electra deberta deberta-v2 mobilebert xlm-roberta mpnet "
    "camembert longformer"
).split()
SEQ2SEQ = "t5 bart mbart pegasus marian".split()
IMAGE = "vit deit beit swin convnext resnet dinov2 segformer mobilenet_v2".split()


def hf_jobs() -> Iterator[Job]:
    import transformers
    from transformers import AutoConfig

    auto = {
        "causal": (CAUSAL, transformers.AutoModelForCausalLM),
        "masked": (MASKED, transformers.AutoModelForMaskedLM),
        "seq2seq": (SEQ2SEQ, transformers.AutoModelForSeq2SeqLM),
        "image": (IMAGE, transformers.AutoModelForImageClassification),
    }
    for kind, (names, model_class) in auto.items():
        for name in names:

            def workload(
                name: str = name, kind: str = kind, model_class: type = model_class
            ) -> Workload:
                config = AutoConfig.for_model(name)
                if kind == "seq2seq":
                    config.decoder_start_token_id = 0
                if name == "deit":  # two classes share this configuration; transformers asks which
                    config.architectures = ["DeiTForImageClassification"]
                for key, value in SMALL.items():
                    if key in config.to_dict() and isinstance(getattr(config, key), int):
                        setattr(config, key, value)

                def text(b: int) -> dict[str, torch.Tensor]:
                    ids = torch.randint(3, 500, (b, 64))
                    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

                def image(b: int) -> dict[str, torch.Tensor]:
                    pixels = torch.empty(b, 3, 224, 224)
                    return {"pixel_values": pixels, "labels": torch.zeros(b, dtype=torch.long)}

                if kind == "image":
                    config.image_size = 224
                return Workload(
                    model=lambda: model_class.from_config(config),
                    inputs=image if kind == "image" else text,
                    precision="amp-bf16",
                    name=f"hf:{name}",
                )

            yield f"hf:{name}", workload


def run(name: str, make: Callable[[], Workload]) -> dict[str, object]:
    start = time.perf_counter()
    row: dict[str, object] = {"model": name}
    try:
        e = estimate(make(), gpu="A100 80GB")
        row |= {"status": "ok", "affine": e.affine, "peak_8": e.peak(8), "notes": e.notes}
    except BatchfitError as error:
        row |= {"status": type(error).__name__, "error": str(error)}
    except Exception as error:  # what the table is for: anything that is not an error of ours
        row |= {"status": "FAILED", "error": f"{type(error).__name__}: {error}"}
    return row | {"seconds": round(time.perf_counter() - start, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="all", choices=["all", "torchvision", "timm", "hf"])
    parser.add_argument("--out", type=Path, default=Path("breadth.json"))
    parser.add_argument("--only", default="", help="run models whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    families = {"torchvision": torchvision_jobs, "timm": timm_jobs, "hf": hf_jobs}
    rows = (
        {r["model"]: r for r in json.loads(options.out.read_text())} if options.out.exists() else {}
    )
    for family, jobs in families.items():
        if options.family not in ("all", family):
            continue
        for name, make in jobs():
            if options.only not in name or (name in rows and not options.only):
                continue
            rows[name] = run(name, make)
            print(json.dumps(rows[name])[:300], flush=True)
            options.out.write_text(json.dumps(list(rows.values()), indent=1))
    good = sum(r["status"] == "ok" for r in rows.values())
    failed = sum(r["status"] == "FAILED" for r in rows.values())
    print(f"{good} of {len(rows)} trace ({good / max(len(rows), 1):.1%}); {failed} failed badly")
    return 1 if failed or good < 0.95 * len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
