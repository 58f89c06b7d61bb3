"""What kernels allocate for themselves: formulas against real numbers."""

import pytest
import torch

from batchfit.estimator import Category, Workload, estimate
from batchfit.estimator.tracing.calls import cublas_workspace_bytes
from batchfit.estimator.tracing.workspaces import ReductionRule

RTX_3090 = {"sm_count": 82, "threads_per_sm": 1536}


def rule(*reduced, **changes):
    values = {"itemsize": 4, "accumulator": 4, **RTX_3090, **changes}
    return ReductionRule(tuple(reduced), **values)


def test_bias_gradient_of_bert_large_on_an_rtx_3090():
    # The measured peak of nb_bertlarge_peak has exactly this over the storages of its operators:
    # 1024 outputs, 2048 inputs each, v = 4, 128 threads a block: 32 blocks per output,
    # 4 B x 1024 x 32 x 32 x 4 = 16 MiB, and 4 B for each of 1024 / 4 / 32 = 8 blocks.
    assert rule(True, False)((2048, 1024, 1024, 1)) == 16 * 2**20
    assert rule(True, False, semaphores=True)((2048, 1024, 1024, 1)) == 32


def test_a_short_reduction_stays_in_its_block():
    # 2048 / 4 warps = 512 values a thread are needed; 512 rows give 128: no second stage.
    assert rule(True, False)((512, 1024, 1024, 1)) == 0


def test_reduction_over_the_fastest_dimension_of_many_rows():
    assert rule(False, True)((2048, 1024, 1024, 1)) == 0  # a grid of rows fills the GPU


def test_full_reduction():
    # One output, 2**20 inputs: vectorized by 4, 512 threads, 2**20 / 512 = 2048 values a thread;
    # target 82 x 3 = 246 blocks, at most 2048 / 16 = 128 and at least 2048 / 256 = 8: 128 x 4 B.
    assert rule(True)((2**20, 1)) == 512


def test_nothing_to_reduce():
    assert rule(True, False)((1, 1024, 1024, 1)) == 0
    assert rule(True, True)((0, 4, 4, 1)) == 0


@pytest.mark.parametrize(
    ("capability", "config", "size"),
    [((8, 0), "", 8_519_680), ((9, 0), "", 33_554_432), ((7, 5), ":4096:8", 33_554_432)],
)
def test_cublas_workspace(capability, config, size):
    assert cublas_workspace_bytes(capability, config) == size


def workspace(gpu, **options):
    job = Workload(model=torch.nn.Linear(64, 64), inputs=torch.empty(1, 64), loss="sum", **options)
    return estimate(job, gpu=gpu).breakdown(8).get(Category.WORKSPACE, 0)


def test_training_has_a_cublas_workspace_per_thread():
    assert workspace("A100 80GB") >= 2 * 8_519_680
    assert workspace("H100") >= 2 * 33_554_432


def test_inference_has_one():
    assert 8_519_680 <= workspace("A100 80GB", inference=True) < 2 * 8_519_680
