"""What kernels allocate for themselves: formulas against real numbers."""

import pytest
import torch

from batchfit.estimator import Category, Workload, WorkloadError, estimate
from batchfit.estimator.tracing.calls import cublas_workspace_bytes
from batchfit.estimator.tracing.conv_workspaces import ConvWorkspaces, conv_workspaces
from batchfit.estimator.tracing.kernels_index import EmbeddingGradientRule, RadixSortRule
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


# -- cuDNN convolutions ----------------------------------------------------------------------------


def conv(channels, out, size, kernel=1, step=1, dtype=torch.float32, capability=(8, 0), **changes):
    x = torch.empty(1, channels, size, size, dtype=dtype, device="meta")
    weight = torch.empty(out, channels, kernel, kernel, dtype=dtype, device="meta")
    padding = kernel // 2
    after = (size + 2 * padding - kernel) // step + 1
    given = {"stride": [step] * 2, "padding": [padding] * 2, "plain": True, **changes}
    return conv_workspaces(x, weight, (1, out, after, after), capability=capability, **given)


@pytest.mark.parametrize(
    ("job", "sizes"),
    [
        # Sizes of trace-035, which are those of ResNet-50's layers at batch 1.
        ((64, 256, 56), (134217728, 134217728, 134217728 + 65536)),  # layer1, conv3
        ((512, 256, 28), (134217728, 134217728, 134742016)),  # layer3.0.conv1
        ((1024, 256, 14), (134217728, 134217728, 135266304)),
        ((512, 1024, 14), (134217728, 134217728, 136314880)),
        ((64, 64, 56, 3), (950288, 1753104, 1753104)),
        ((128, 128, 56, 3, 2), (2195472, 2596880, 2596880)),
        ((128, 128, 28, 3), (991248, 1392656, 1392656)),
        ((3, 64, 224, 7, 2), (3851024, 3851024, 3851024)),
        ((256, 512, 56, 1, 2), (5341200, 5341200, 5341200)),
    ],
)
def test_convolutions_of_a_recorded_resnet_50(job, sizes):
    found = conv(*job)
    assert (found.forward, found.input_gradient, found.weight_gradient) == sizes


def test_without_tensor_cores_only_the_backward_pass_of_1x1_takes_a_workspace():
    found = conv(64, 256, 56, capability=(7, 5))
    assert (found.forward, found.input_gradient, found.weight_gradient) == (0, 2**27, 2**27)
    assert conv(64, 64, 56, 3, capability=(7, 5)) == ConvWorkspaces()


def test_half_precision_has_tensor_cores_on_a_t4():
    found = conv(64, 64, 56, 3, dtype=torch.float16, capability=(7, 5))
    assert found.forward == 2 * (64 * 56 * 56 + 64 * 64 * 9) + 16
    assert found.required and not conv(64, 64, 56, 3).required
    assert conv(64, 64, 56, 3, dtype=torch.bfloat16, capability=(7, 5)) == ConvWorkspaces()


def test_before_torch_2_also_1x1_convolutions_are_transposed():
    found = conv(64, 64, 56, dtype=torch.float16, matmul=False)
    operands = 2 * (2 * 64 * 56 * 56 + 64 * 64) + 16
    assert found == ConvWorkspaces(operands, operands, operands, required=True)
    assert not conv(64, 64, 56, dtype=torch.float16).required


def test_half_precision_in_nchw_needs_its_transposes_to_fit():
    layers = torch.nn.Conv2d(64, 64, 3, padding=1)
    job = Workload(
        model=layers, inputs=torch.empty(1, 64, 64, 64), loss="sum", precision="fp16",
        optimizer="none",
    )  # fmt: skip
    with_them = estimate(job, gpu="T4")
    without = estimate(job, gpu="T4", workspaces=("cublas", "kernels", "convolutions"))
    assert not with_them.timeline_at(4).optional
    image = 64 * 64 * 64 * 2
    assert with_them.peak(64) - without.peak(64) >= 64 * image  # more than one more image each


def test_tf32_switched_off_is_as_without_tensor_cores(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert conv(64, 64, 56, 3) == ConvWorkspaces()


def test_unknown_convolutions_count_nothing():
    assert conv(64, 64, 56, 3, plain=False) == ConvWorkspaces()
    assert conv(64, 64, 56, 3, dtype=torch.float64) == ConvWorkspaces()


def convolutional(**options):
    layers = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 1), torch.nn.Conv2d(64, 64, 3, padding=1))
    job = Workload(model=layers, inputs=torch.empty(1, 64, 32, 32), loss="sum")
    return estimate(job, gpu="A100 80GB", **options)


def test_peak_range_is_with_and_without_workspaces():
    made = convolutional()
    low, high = made.peak_range(4)
    without = convolutional(workspaces=("cublas", "kernels"))
    assert high == made.peak(4)
    assert low == without.peak(4) == without.peak_range(4)[1]
    assert high - low >= 120 * 2**20


def test_cudnn_does_without_its_workspace_where_memory_is_short():
    made, without = convolutional(), convolutional(workspaces=("cublas", "kernels"))
    room = 600 * 2**20
    found = made.answer(budget=room)
    # Where a workspace did fit, it leaves a gap that one without would not have made.
    assert 0.95 * without.answer(budget=room).batch < found.batch
    assert 0 < found.with_workspaces < found.batch
    assert found.peak <= room
    assert made.replay(found.batch, room).skipped > 0
    assert made.fits_with_workspaces(found.with_workspaces, room)
    assert not made.fits_with_workspaces(found.with_workspaces + 1, room)


def test_a_workspace_kind_that_does_not_exist():
    with pytest.raises(WorkloadError, match="cublas, kernels, transposes, convolutions"):
        convolutional(workspaces=("cudnn",))
    with pytest.raises(WorkloadError, match="found 'cublas'"):
        convolutional(workspaces="cublas")


# -- lookups ---------------------------------------------------------------------------------------


def test_embedding_gradient_sorts_above_3072_indices():
    sizes = {
        what: EmbeddingGradientRule(50_000, 8, what) for what in ("indices", "segments", "partials")
    }
    assert [rule((3072,)) for rule in sizes.values()] == [0, 0, 0]
    # 4096 indices into 50,000 rows: at most 4096 segments, 409 + 4096 parts.
    assert sizes["indices"]((8, 512)) == 3 * 4096 * 8
    assert sizes["segments"]((8, 512)) == 2 * 4096 * 8
    assert sizes["partials"]((8, 512)) == (409 + 4096) * 8
    # Into 100 rows: 100 segments.
    assert EmbeddingGradientRule(100, 4 * 64, "partials")((4096,)) == (409 + 100) * 256


def test_embedding_gradient_in_a_step():
    job = Workload(
        model=torch.nn.Embedding(1000, 64), inputs=torch.zeros(1, 1024, dtype=torch.long),
        loss="sum", optimizer="sgd",
    )  # fmt: skip
    made = estimate(job, gpu="A100 80GB", workspaces=("kernels",))
    timeline = made.timeline_at(8)
    sizes = timeline.sizes(8)
    found = sorted(
        int(sizes[i]) for i, op in enumerate(timeline.operators)
        if op == "aten::embedding_dense_backward" and timeline.categories[i] is Category.WORKSPACE
    )  # fmt: skip
    partials = 819 + 1000
    each = [3 * 8192 * 8, 2 * 1000 * 8, partials * 8, partials * 64 * 4]
    assert found == sorted(each * 2)  # of two steps


@pytest.mark.parametrize(("pairs", "passes", "size"), [(2048, 2, 1), (4096, 2, 72191), (0, 2, 0)])
def test_radix_sort(pairs, passes, size):
    assert RadixSortRule(passes)((pairs,)) == size


# -- attention -------------------------------------------------------------------------------------


def attention_backward(dtype, gpu, heads=4, kv=4, length=100, width=64, **options):
    def build(device):
        q, k, v = (
            torch.randn(2, h, length, width, device=device, dtype=dtype, requires_grad=True)
            for h in (heads, kv, kv)
        )

        def step(batch):
            mask = torch.zeros(length, length, device=device, dtype=dtype) if options else None
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=kv != heads
            ).sum().backward()

        return step

    made = estimate(Workload.from_step(build), gpu=gpu, workspaces=("kernels",))
    timeline = made.timeline_at(1)
    sizes = timeline.sizes(1)
    return {
        int(sizes[i]) for i, op in enumerate(timeline.operators)
        if op.endswith("attention_backward") and sizes[i]
    }  # fmt: skip


def test_flash_attention_sums_the_gradient_of_q_in_fp32():
    sizes = attention_backward(torch.bfloat16, "A100 80GB")
    rows = 128  # 100 rounded up
    assert 4 * 2 * 4 * rows in sizes  # softmax_d
    assert 4 * 2 * 4 * rows * 64 in sizes  # dq_accum


def test_flash_attention_expands_the_gradients_of_grouped_keys():
    one, grouped = (attention_backward(torch.bfloat16, "A100 80GB", kv=kv) for kv in (4, 2))
    assert 2 * 2 * 4 * 100 * 64 in grouped - {2 * 2 * 2 * 100 * 64}
    assert one


def test_efficient_attention_in_fp32_multiplies_output_and_gradient():
    sizes = attention_backward(torch.float32, "A100 80GB")
    assert 4 * 2 * 4 * 100 * 64 in sizes  # the product, of the output's size
    assert 2 * 4 * 2 * (64 * 64 * 4 + 16) in sizes  # two blocks of 64 queries per head


# -- norms -----------------------------------------------------------------------------------------


def test_rms_norm_is_one_kernel_that_saves_a_number_per_row():
    job = Workload(
        model=torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.RMSNorm(64)),
        inputs=torch.empty(1, 128, 64), loss="sum",
    )  # fmt: skip
    made = estimate(job, gpu="A100 80GB", workspaces=False)
    timeline = made.timeline_at(4)
    sizes = timeline.sizes(4)
    of_norm = [
        int(sizes[i]) for i, op in enumerate(timeline.operators) if op == "aten::_fused_rms_norm"
    ]
    assert of_norm == [4 * 128 * 64 * 4, 4 * 128 * 4] * 2
    assert "aten::rsqrt" not in timeline.operators


def test_rms_norm_gives_torch_s_gradients():
    # The same formula on real data: the simulated kernel may not change what autograd is told.
    norm, x = torch.nn.RMSNorm(8, eps=1e-6), torch.randn(3, 8, requires_grad=True)
    made = estimate(Workload(model=norm, inputs=torch.empty(1, 8), loss="sum"), gpu="T4")
    assert made.peak(1) > 0
    norm(x).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None


@pytest.mark.parametrize("transposed", [False, True])
def test_softmax_and_layer_norm_copy_what_is_not_contiguous(transposed):
    def build(device):
        x = torch.randn(64, 64, device=device)

        def step(batch):
            y = x.t() if transposed else x
            torch.softmax(y, -1), torch.nn.functional.layer_norm(y, (64,))

        return step

    made = estimate(Workload.from_step(build), gpu="T4", workspaces=False)
    copies = made.timeline_at(1).operators.count("aten::contiguous")
    assert copies == (4 if transposed else 0)  # two steps
