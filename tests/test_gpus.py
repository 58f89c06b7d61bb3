"""The GPU catalogue: every row is sound, and names are matched the way people write them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict

import pytest

from batchfit.estimator.errors import TargetError
from batchfit.estimator.gpus import (
    GPU,
    THREADS_PER_SM,
    all_gpus,
    context_bytes_of,
    find_gpu,
)

GIB, MIB = 2**30, 2**20
CATALOGUE = all_gpus()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("A100 80GB", "A100-SXM4-80GB"),
        ("a100-sxm4-80gb", "A100-SXM4-80GB"),
        ("a100_80g", "A100-SXM4-80GB"),
        ("a100-80", "A100-SXM4-80GB"),
        ("80 GB A100 PCIe", "A100-PCIE-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("rtx 4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx-3090", "RTX 3090"),
        ("3090", "RTX 3090"),
        ("3090ti", "RTX 3090 Ti"),
        ("GeForce RTX 3090 24GB", "RTX 3090"),
        ("Tesla T4", "T4"),
        ("t4", "T4"),
        ("Tesla P100-PCIE-16GB", "P100-PCIE-16GB"),
        ("P100", "P100-PCIE-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("v100 32gb", "V100-SXM2-32GB"),
        ("h100", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("H200", "H200-SXM-141GB"),
        ("B200", "B200"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("MI300X", "MI300X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("7900xtx", "RX 7900 XTX"),
        ("GTX 1080 Ti", "GTX 1080 Ti"),
        ("1080ti", "GTX 1080 Ti"),
        ("RTX4070TiSuper", "RTX 4070 Ti SUPER"),
        ("RTX 4060 Ti 16GB", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
        ("rtx 4060 mobile", "RTX 4060 Laptop"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("a6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("A100-80GB MIG 3g.40gb", "A100-80GB MIG 3g.40gb"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100-80GB MIG 3g.40gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100-80GB MIG 1g.10gb"),
        ("a100 1g.5gb", "A100-40GB MIG 1g.5gb"),
        ("Jetson AGX Orin 32GB", "Jetson AGX Orin 32GB"),
        ("jetson orin nano", "Jetson Orin Nano 8GB"),
    ],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert find_gpu(written).name == name


def test_every_canonical_name_and_case_leads_to_its_row() -> None:
    for gpu in CATALOGUE:
        assert find_gpu(gpu.name) == find_gpu(gpu.name.lower()) == find_gpu(gpu) == gpu


def test_an_ambiguous_name_takes_the_smallest_variant_and_says_so() -> None:
    gpu = find_gpu("a100")
    assert gpu == find_gpu("A100-SXM4-40GB")
    assert "least memory" in gpu.note
    assert "A100-SXM4-80GB" in gpu.note
    assert find_gpu("rtx 4060 ti").name == "RTX 4060 Ti 8GB"
    assert not find_gpu("A100-SXM4-40GB").note


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("rtx 3091", "RTX 3090"),
        ("rtx 4900", "RTX 4090"),
        ("A100 60GB", "A100-SXM4-80GB"),
        ("RTX 3090 48GB", "known as RTX 3090"),
        ("abacus", "nothing in the catalogue is close"),
        ("", "nothing in the catalogue is close"),
    ],
)
def test_unknown_gpus_get_one_line_with_the_closest(written: str, said: str) -> None:
    with pytest.raises(TargetError) as caught:
        find_gpu(written)
    message = str(caught.value)
    assert said in message
    assert "`batchfit gpus`" in message
    assert "\n" not in message


def test_the_catalogue_is_wide() -> None:
    assert len(CATALOGUE) >= 40
    assert len({gpu.name for gpu in CATALOGUE}) == len(CATALOGUE)
    assert {gpu.category for gpu in CATALOGUE} == {
        "consumer",
        "workstation",
        "data-centre",
        "mig",
        "embedded",
    }
    assert {gpu.vendor for gpu in CATALOGUE} == {"nvidia", "amd"}


@pytest.mark.parametrize("gpu", CATALOGUE, ids=lambda gpu: gpu.name)
def test_each_row_is_sound(gpu: GPU) -> None:
    assert 0.87 < gpu.total_bytes / (gpu.nominal_gb * GIB) <= 1.03 or gpu.category == "mig"
    assert gpu.total_bytes <= gpu.total_bytes_max < 1.06 * gpu.total_bytes
    assert 0 < gpu.context_bytes < 0.08 * gpu.total_bytes or gpu.total_bytes < 10 * GIB
    assert gpu.context_bytes == context_bytes_of(gpu.vendor, gpu.sm_count, gpu.threads_per_sm)
    assert 0 < gpu.sm_count <= 304
    assert 20 < gpu.bandwidth_gbs <= 8000
    if gpu.vendor == "nvidia":
        assert gpu.arch == f"sm_{gpu.capability[0]}{gpu.capability[1]}"
        assert gpu.threads_per_sm == THREADS_PER_SM[gpu.capability]
    else:
        assert gpu.arch.startswith("gfx")
    for figure in ("total_bytes", "capability", "sm_count", "threads_per_sm", "bandwidth_gbs"):
        assert gpu.sources[figure]
    assert gpu.exact_total != gpu.sources["total_bytes"].startswith("derived")
    assert hash(gpu) == hash(find_gpu(gpu.name))


def test_a_gpu_can_be_stored() -> None:
    gpu = find_gpu("T4")
    assert pickle.loads(pickle.dumps(gpu)) == copy.deepcopy(gpu) == gpu
    assert asdict(gpu)["sources"]["total_bytes"]


def test_slices_lie_within_their_gpu() -> None:
    for gpu in CATALOGUE:
        if gpu.category == "mig":
            parent = find_gpu(gpu.name.partition(" MIG ")[0])
            assert gpu.total_bytes <= parent.total_bytes
            assert gpu.sm_count <= parent.sm_count
            assert gpu.capability == parent.capability


@pytest.mark.parametrize(
    ("name", "seen_gib"),
    # `total capacity of N GiB` in public out-of-memory messages that name the card.
    [
        ("T4", 14.56),
        ("RTX 3090", 23.69),
        ("RTX 4090", 23.64),
        ("RTX 2080 Ti", 10.76),
        ("V100-SXM2-16GB", 15.77),
        ("V100-SXM2-32GB", 31.74),
        ("A100-SXM4-40GB", 39.39),
        ("A100-SXM4-80GB", 79.15),
        ("H100-SXM5-80GB", 79.19),
        ("H200-SXM-141GB", 139.81),
        ("B200", 178.35),
        ("RTX 5090", 31.36),
        ("MI300X", 191.98),
    ],
)
def test_totals_agree_with_messages_seen_elsewhere(name: str, seen_gib: float) -> None:
    gpu = find_gpu(name)
    assert gpu.exact_total
    assert gpu.total_bytes - 0.01 * GIB <= seen_gib * GIB <= gpu.total_bytes_max + 0.02 * GIB


@pytest.mark.parametrize(
    ("name", "seen_mib"),
    # in use - allocated - reserved but unallocated, from out-of-memory messages of one process
    [
        ("T4", (123, 147)),
        ("V100-SXM2-32GB", (378, 400)),
        ("L4", (255, 255)),
        ("RTX A6000", (305, 320)),
        ("RTX 3090", (315, 420)),
        ("RTX 4090", (440, 472)),
        ("A100-SXM4-80GB", (510, 520)),
        ("RTX 5090", (593, 593)),
        ("H200-SXM-141GB", (670, 670)),
        ("RTX PRO 6000 Blackwell", (692, 692)),
        ("B200", (712, 712)),
    ],
)
def test_one_context_rule_explains_what_was_seen(name: str, seen_mib: tuple[int, int]) -> None:
    context = find_gpu(name).context_bytes / MIB
    assert seen_mib[0] <= context  # not below a plain process
    assert context - sum(seen_mib) / 2 < 90  # and not far above
