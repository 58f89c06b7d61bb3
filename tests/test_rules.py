"""What CUDA would run: autocast's lists, kernels of attention and norms, layouts, known values."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from batchfit.estimator import DataDependentError, Phase, TraceError, Workload
from batchfit.estimator.cuda_rules import AttentionRules
from batchfit.estimator.cuda_rules import autocast as rules

from .helpers import A100, gpu, run, run_code, run_step

LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": rules.LOWER_PRECISION,
    "AT_FORALL_FP32": rules.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": rules.FP32_SET_OPT_DTYPE,
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": rules.FP32_APPEND_DTYPE,
    "AT_FORALL_PROMOTE": rules.PROMOTE,
}
EVERY = [name for names in (*LISTS.values(), rules.OTHER) for name in names]


# -- autocast: the lists -----------------------------------------------------------------------


# Registered one by one in autocast_mode.cpp and not in a macro.
BESIDE = {
    "AT_FORALL_LOWER_PRECISION_FP": {"cudnn_convolution", "cudnn_convolution_transpose"},
    "AT_FORALL_FP32": {"linalg_matrix_sqrth"},
}


def existing(names):
    return {name for name in names if rules.overload(name) is not None}


def registered():
    """Operators that this torch registers for AutocastCUDA, without ``aten::``."""
    return {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }


def test_no_operator_is_listed_twice():
    assert len(EVERY) == len(set(EVERY))


def test_every_registration_of_torch_is_in_a_list():
    assert registered() - set(EVERY) == set()


def test_every_listed_operator_is_registered_by_torch():
    # a build without CUDA does not register what lives in cuDNN's own files
    missing = existing(EVERY) - registered()
    assert missing == (set() if torch.version.cuda else {"_cudnn_rnn"})


def header_macro(macro):
    """The operators of one macro in the header that the installed torch ships."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text().replace("\\\n", " ")
    (body,) = re.findall(rf"#define {macro}\(_\)(.*)\n", text)
    if macro == "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE":
        return set(re.findall(r'"([\w.]+)"', body))
    found = re.findall(r"_\(\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)", body)
    return {".".join(part for part in pair if part) for pair in found}


@pytest.mark.parametrize("macro", LISTS)
def test_lists_are_those_of_the_header(macro):
    there = existing(header_macro(macro))
    assert len(there) >= 2
    assert existing(LISTS[macro]) == there | existing(BESIDE.get(macro, ()))


# -- autocast: what is done --------------------------------------------------------------------

HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64


def cuda(*shape, dtype=FLOAT):
    return torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (lambda: cuda(4, 4) @ cuda(4, 4), HALF),
        (lambda: F.linear(cuda(4, 4, dtype=HALF), cuda(4, 4)), HALF),
        (lambda: F.conv2d(cuda(1, 3, 8, 8), cuda(4, 3, 3, 3)), HALF),
        (lambda: torch.einsum("ij,jk->ik", cuda(4, 4), cuda(4, 4)), HALF),
        (lambda: cuda(4, 4, dtype=DOUBLE) @ cuda(4, 4, dtype=DOUBLE), DOUBLE),  # not eligible
        (lambda: cuda(4, dtype=HALF).exp(), FLOAT),
        (lambda: cuda(4, dtype=HALF) ** 2, FLOAT),
        (lambda: F.layer_norm(cuda(4, 4, dtype=HALF), (4,)), FLOAT),
        (lambda: F.mse_loss(cuda(4, dtype=HALF), cuda(4)), FLOAT),
        (lambda: F.softmax(cuda(4, 4, dtype=HALF), -1), FLOAT),
        (lambda: F.softmax(cuda(4, 4, dtype=HALF), -1, dtype=HALF), HALF),  # asked for
        (lambda: F.log_softmax(cuda(4, 4, dtype=HALF), -1), FLOAT),
        (lambda: cuda(4, dtype=HALF).sum(), FLOAT),
        (lambda: cuda(4, 4, dtype=HALF).sum(0), FLOAT),
        (lambda: cuda(4, 4, dtype=HALF).cumsum(0), FLOAT),
        (lambda: cuda(4, 4, dtype=HALF).prod(), FLOAT),
        (lambda: torch.linalg.vector_norm(cuda(4, dtype=HALF)), FLOAT),
        (lambda: torch.ops.aten.norm(cuda(4, dtype=HALF), 2), FLOAT),
        (lambda: torch.ops.aten.norm(cuda(4, 4, dtype=HALF), 2, [1]), FLOAT),
        (lambda: torch.addcmul(cuda(4, dtype=HALF), cuda(4), cuda(4, dtype=HALF)), FLOAT),
        (lambda: torch.addcmul(*(cuda(4, dtype=HALF) for _ in range(3))), HALF),
        (lambda: cuda(4, dtype=HALF) + cuda(4, dtype=HALF), HALF),  # on no list
        (lambda: cuda(4, dtype=HALF).mean(), HALF),
        (lambda: F.relu(cuda(4)), FLOAT),
        (lambda: F.gelu(cuda(4, dtype=HALF)), HALF),
        (lambda: torch.cat([cuda(4, dtype=HALF), cuda(4)]), FLOAT),
        (lambda: F.scaled_dot_product_attention(*(cuda(2, 2, 8, 8) for _ in range(3))), HALF),
    ],
)
def test_dtype_of_a_result_under_autocast(call, result):
    with gpu(), torch.autocast("cuda", HALF):
        assert call().dtype is result


def test_autocast_has_the_dtype_that_was_asked_for():
    with gpu(), torch.autocast("cuda", torch.bfloat16):
        assert (cuda(4, 4) @ cuda(4, 4)).dtype is torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert (cuda(4, 4) @ cuda(4, 4)).dtype is FLOAT
    with gpu():
        assert (cuda(4, 4) @ cuda(4, 4)).dtype is FLOAT


def test_softmax_of_half_makes_no_copy_of_its_input():
    # fp16 in, fp32 out in one kernel (half_to_float): 4 x 4 x 4 = 64 bytes and nothing else
    def code():
        x = cuda(4, 4, dtype=HALF)
        x.softmax(-1, dtype=FLOAT)
        with torch.autocast("cuda", HALF):
            F.log_softmax(x, -1)

    found = run_code(code)
    assert found.sizes("_to_copy") == []
    assert found.sizes("_softmax") == [64]
    assert found.sizes("_log_softmax") == [64]


def test_softmax_of_bfloat16_is_converted_first():
    # SoftMax.cpp fuses the conversion for fp16 only: 4 x 4 x 4 for the copy, 64 for the result
    found = run_code(lambda: cuda(4, 4, dtype=torch.bfloat16).softmax(-1, dtype=FLOAT))
    assert found.sizes("_to_copy") == [64]
    assert found.sizes("_softmax") == [64]


def test_layer_norm_of_half_converts_input_and_weights_nothing_more():
    def code():
        norm = nn.LayerNorm(64, device="cuda")
        with torch.autocast("cuda", HALF):
            norm(cuda(8, 64, dtype=HALF))

    # input 8 x 64 x 4 = 2048; the weights are fp32 already
    assert run_code(code).sizes("_to_copy") == [2048]


def test_binary_cross_entropy_is_refused_under_autocast():
    # "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast"
    def code():
        with torch.autocast("cuda", HALF):
            F.binary_cross_entropy(cuda(4), cuda(4))

    with pytest.raises(TraceError, match="autocast"):
        run_code(code)


# -- attention: the choice ---------------------------------------------------------------------

T4, V100, A100_, RTX3090, L4, RTX4090, H100, B200, RTX5090 = (
    (7, 5), (7, 0), (8, 0), (8, 6), (8, 9), (8, 9), (9, 0), (10, 0), (12, 0),
)  # fmt: skip
BF16 = torch.bfloat16


def choice(
    capability, dtype=HALF, dim=64, *, mask=None, dropout=0.0, causal=False, heads=(8, 8),
    lengths=(128, 128), train=True, forced=None, dim_v=None, gqa=None, layout="plain",
):  # fmt: skip
    """The kernel for q (2, H, L, E), k (2, H_kv, S, E) and v."""

    def make(h, length, width):
        shape = (2, length, h, width) if layout == "transposed" else (2, h, length, width)
        if layout == "strided":
            shape = (*shape[:-1], width * 2)
        x = torch.empty(shape, dtype=dtype, device="meta")
        if layout == "transposed":
            x = x.transpose(1, 2)
        x = x[..., ::2] if layout == "strided" else x
        return x.detach().requires_grad_(train)

    q = make(heads[0], lengths[0], dim)
    k, v = make(heads[1], lengths[1], dim), make(heads[1], lengths[1], dim_v or dim)
    if isinstance(mask, str):
        full = {"bool": torch.bool, "float": dtype}[mask.split()[0]]
        mask = torch.empty(2, 1, *lengths, dtype=full, device="meta")
    gqa = heads[0] != heads[1] if gqa is None else gqa
    return AttentionRules(capability, forced).choose(q, k, v, mask, dropout, causal, gqa)


@pytest.mark.parametrize(
    ("expected", "capability", "settings"),
    [
        # hardware and dtype (check_flash_attention_hardware_support, check_dtypes_*)
        ("efficient", T4, {}),
        ("efficient", T4, {"dtype": FLOAT}),
        ("math", T4, {"dtype": BF16}),
        ("efficient", V100, {}),
        ("flash", A100_, {}),
        ("flash", A100_, {"dtype": BF16}),
        ("efficient", A100_, {"dtype": FLOAT}),
        ("math", A100_, {"dtype": DOUBLE}),
        ("flash", RTX3090, {"dtype": BF16}),
        ("flash", RTX4090, {"dtype": BF16}),
        ("flash", RTX5090, {"dtype": BF16}),
        ("cudnn", H100, {"dtype": BF16}),
        ("cudnn", H100, {}),
        ("cudnn", B200, {"dtype": BF16}),
        ("efficient", H100, {"dtype": FLOAT}),
        # masks: flash takes none
        ("efficient", A100_, {"dtype": BF16, "mask": "bool"}),
        ("efficient", A100_, {"dtype": BF16, "mask": "float"}),
        ("cudnn", H100, {"dtype": BF16, "mask": "bool"}),
        ("efficient", T4, {"mask": "bool"}),
        ("flash", A100_, {"causal": True}),
        ("efficient", A100_, {"causal": True, "lengths": (64, 128)}),  # non-square causal
        ("flash", A100_, {"lengths": (64, 128)}),
        # dropout
        ("flash", A100_, {"dropout": 0.1}),
        ("efficient", A100_, {"dropout": 0.1, "dtype": FLOAT}),
        ("flash", H100, {"dropout": 0.1}),  # cuDNN: multiples of 1/16 only
        ("cudnn", H100, {"dropout": 0.125}),
        # head_dim of fp16: flash pads to 8, efficient needs 8 on tensor cores
        ("flash", A100_, {"dim": 60}),
        ("math", A100_, {"dim": 60, "mask": "bool"}),
        ("math", T4, {"dim": 60}),
        ("flash", A100_, {"dim": 256}),
        ("efficient", A100_, {"dim": 264}),
        ("flash", A100_, {"dim": 1}),
        # head_dim of fp32: 4 on Ampere (tensor cores), any on Turing
        ("efficient", A100_, {"dtype": FLOAT, "dim": 60}),
        ("math", A100_, {"dtype": FLOAT, "dim": 62}),
        ("efficient", T4, {"dtype": FLOAT, "dim": 61}),
        ("efficient", A100_, {"dtype": FLOAT, "dim": 512}),
        # another head_dim for v: no flash
        ("efficient", A100_, {"dim": 64, "dim_v": 128}),
        # wide heads on consumer cards: the backward kernel lacks shared memory
        ("flash", RTX3090, {"dim": 192}),
        ("efficient", RTX3090, {"dim": 200}),
        ("efficient", RTX3090, {"dim": 224}),
        ("flash", RTX3090, {"dim": 256}),
        ("efficient", RTX3090, {"dim": 256, "dropout": 0.1}),
        ("flash", RTX3090, {"dim": 200, "train": False}),
        ("efficient", L4, {"dim": 256, "dropout": 0.1}),
        ("efficient", RTX5090, {"dim": 200}),
        ("flash", A100_, {"dim": 256, "dropout": 0.1}),
        # grouped queries
        ("flash", A100_, {"heads": (8, 2)}),
        ("efficient", A100_, {"heads": (8, 2), "mask": "bool"}),
        ("cudnn", H100, {"heads": (8, 2)}),
        ("math", A100_, {"heads": (8, 2), "gqa": False}),
        ("math", A100_, {"heads": (8, 3)}),
        # layout: the last dimension must be dense, the others may not
        ("flash", A100_, {"layout": "transposed"}),
        ("math", A100_, {"layout": "strided"}),
        # nothing to attend to
        ("math", A100_, {"lengths": (0, 128)}),
        ("flash", H100, {"lengths": (128, 1)}),  # cuDNN does not take one key
        # a preference is followed where the kernel can run
        ("math", A100_, {"forced": "math"}),
        ("efficient", A100_, {"forced": "efficient"}),
        ("flash", H100, {"forced": "flash"}),
        ("cudnn", A100_, {"forced": "cudnn"}),
        ("efficient", A100_, {"forced": "flash", "dtype": FLOAT}),
        ("efficient", T4, {"forced": "flash"}),
    ],
)
def test_attention_kernel(expected, capability, settings):
    assert choice(capability, **settings) == expected


def test_the_order_is_kept_by_the_context_manager():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choice(A100_) == "efficient"
    with sdpa_kernel(SDPBackend.MATH):
        assert choice(A100_) == "math"
        assert choice(H100) == "math"
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert choice(A100_) == "flash"
        assert choice(H100) == "flash"
        assert choice(A100_, FLOAT) == "math"
    assert choice(A100_) == "flash"


def test_switches_of_backends_are_respected():
    before = torch.backends.cuda.flash_sdp_enabled()
    try:
        torch.backends.cuda.enable_flash_sdp(False)
        assert choice(A100_) == "efficient"
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


def test_a_kernel_that_is_switched_off_cannot_be_forced():
    with sdpa_kernel(SDPBackend.MATH):
        assert choice(A100_, forced="flash") == "math"


@pytest.mark.skipif(torch.__version__ < "2.14", reason="normalize_unbatched_input is new in 2.14")
def test_unbatched_attention_is_fused_since_2_14():
    q = torch.empty(8, 128, 64, dtype=HALF, device="meta")
    assert AttentionRules(A100_).choose(q, q, q, None, 0.0, False, False) == "flash"

    def code():
        q = cuda(8, 128, 64, dtype=HALF).requires_grad_()
        assert F.scaled_dot_product_attention(q, q, q).shape == (8, 128, 64)

    # the output and one log-sum-exp per head and query
    log = run_code(code).trace.log
    sizes = [s for s, o in zip(log.sizes, log.operators, strict=True) if "attention" in o]
    assert 8 * 128 * 64 * 2 in sizes and 8 * 128 * 4 in sizes


@pytest.mark.skipif(torch.__version__ < "2.14", reason="supports_mqa is new in 2.14")
def test_one_key_head_for_all_is_fused_since_2_14():
    assert choice(A100_, heads=(8, 1), gqa=False) == "flash"


def test_a_mask_with_a_strided_last_dimension_is_not_fused():
    # check_last_dim_stride_equals_1_dense looks at the mask, too
    mask = torch.empty(2, 1, 128, 1, dtype=torch.bool, device="meta").expand(2, 1, 128, 128)
    assert mask.stride(-1) == 0
    assert choice(A100_, mask=mask) == "math"


def test_no_kernel_left_is_an_error_as_on_the_gpu():
    # "No available kernel. Aborting execution."
    def code():
        q = cuda(2, 2, 16, 16)  # fp32: not for flash
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, q, q)

    with pytest.raises(TraceError, match=r"(?i)no available kernel"):
        run_code(code)


# -- attention: the bytes ----------------------------------------------------------------------


def attention(name, dtype=HALF, mask=None, **settings):
    """Storages of one call on q, k, v of shape (2, 4, 32, 64), without those of q, k, v."""

    def code():
        q, k, v = (cuda(2, 4, 32, 64, dtype=dtype).requires_grad_() for _ in range(3))
        given = torch.ones(*mask, dtype=torch.bool, device="cuda") if mask else None
        F.scaled_dot_product_attention(q, k, v, attn_mask=given, **settings)

    made = run_code(code, name)
    return [(s.operator, s.size) for s in made.storages if s.operator not in ("empty", "ones")]


def test_flash_keeps_output_and_log_sum():
    # output 2 x 4 x 32 x 64 x 2 = 32768; logsumexp 2 x 4 x 32 x 4 = 1024; Philox seed and offset
    name = "_scaled_dot_product_flash_attention"
    found = attention(A100)
    assert found[0] == (name, 32768)
    assert (name, 1024) in found
    assert max(size for _, size in found[1:]) == 1024


def test_efficient_keeps_output_and_log_sum():
    # fp32: 65536; logsumexp 2 x 4 x 32 x 4 = 1024
    found = attention(A100, FLOAT)
    assert found[0] == ("_scaled_dot_product_efficient_attention", 65536)
    assert sum(size for _, size in found) < 65536 + 1024 + 512


def test_bool_mask_becomes_a_bias_of_the_dtype_of_the_query():
    # mask (32, 32): bias 32 x 32 x 2 = 2048, its inverse 1024; 32 is a multiple of 8: no padding
    found = attention(A100, mask=(32, 32))
    assert ("zeros_like", 2048) in found
    assert ("logical_not", 1024) in found
    assert "constant_pad_nd" not in dict(found)


def test_math_keeps_the_scores():
    # 2 x 4 x 32 x 32 x 4 = 32768: in fp32 (torch computes half precision in fp32 here)
    found = attention("T4", BF16)
    assert ("bmm", 32768) in found
    assert ("_safe_softmax", 32768) in found


def test_flash_pads_heads_to_a_multiple_of_eight():
    def code():
        q = cuda(2, 4, 32, 60, dtype=HALF)
        assert F.scaled_dot_product_attention(q, q, q).shape == (2, 4, 32, 60)

    made = run_code(code)
    # 2 x 4 x 32 x 64 x 2 = 32768 for each of q, k, v
    assert made.sizes("constant_pad_nd") == [32768] * 3


def test_attention_can_be_forced_for_a_whole_trace():
    def code():
        q = cuda(2, 4, 32, 64, dtype=HALF)
        F.scaled_dot_product_attention(q, q, q)

    assert not run_code(code).find("_safe_softmax")
    assert run_code(code, attention="math").find("_safe_softmax")


# -- norms, convolutions, recurrent layers -----------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape", "dtype", "kernel"),
    [
        (lambda: nn.BatchNorm2d(8), (4, 8, 4, 4), FLOAT, "cudnn_batch_norm"),
        (lambda: nn.BatchNorm3d(8), (4, 8, 2, 2, 2), FLOAT, "cudnn_batch_norm"),
        (lambda: nn.BatchNorm1d(8), (4, 8, 6), FLOAT, "cudnn_batch_norm"),
        (lambda: nn.BatchNorm1d(8), (4, 8), FLOAT, "native_batch_norm"),  # 2-D: not cuDNN
        (lambda: nn.BatchNorm2d(8), (4, 8, 4, 4), HALF, "cudnn_batch_norm"),  # fp32 weights
        (lambda: nn.BatchNorm2d(8).half(), (4, 8, 4, 4), HALF, "native_batch_norm"),
        (lambda: nn.BatchNorm2d(8).double(), (4, 8, 4, 4), DOUBLE, "native_batch_norm"),
        (lambda: nn.BatchNorm2d(8, affine=False), (4, 8, 4, 4), FLOAT, "native_batch_norm"),
        (
            lambda: nn.BatchNorm2d(8, track_running_stats=False),
            (4, 8, 4, 4),
            FLOAT,
            "cudnn_batch_norm",
        ),
    ],
)
def test_batch_norm_kernel(make, shape, dtype, kernel):
    def code():
        make().to("cuda")(torch.empty(shape, dtype=dtype, device="cuda"))

    found = {s.operator for s in run_code(code).storages if "batch_norm" in s.operator}
    assert found == {kernel}


def test_batch_norm_without_cudnn():
    def code():
        with torch.backends.cudnn.flags(enabled=False):
            nn.BatchNorm2d(8, device="cuda")(cuda(4, 8, 4, 4))

    found = {s.operator for s in run_code(code).storages if "batch_norm" in s.operator}
    assert found == {"native_batch_norm"}


LAST = torch.channels_last


@pytest.mark.parametrize(
    ("x_format", "weight_format", "expected"),
    [
        (torch.contiguous_format, torch.contiguous_format, torch.contiguous_format),
        (LAST, LAST, LAST),
        (LAST, torch.contiguous_format, LAST),
        (torch.contiguous_format, LAST, LAST),
    ],
)
def test_convolution_output_follows_input_or_weight(x_format, weight_format, expected):
    def code():
        x = cuda(2, 8, 6, 6).contiguous(memory_format=x_format)
        weight = cuda(4, 8, 3, 3).contiguous(memory_format=weight_format)
        out = F.conv2d(x, weight)
        assert out.shape == (2, 4, 4, 4)
        assert out.is_contiguous(memory_format=expected)

    # What does not have the format of the convolution is copied while it runs:
    # input 2 x 8 x 6 x 6 x 4 = 2304, weight 4 x 8 x 3 x 3 x 4 = 1152.
    wanted = [2304] * (expected is LAST and x_format is not LAST)
    wanted += [1152] * (expected is LAST and weight_format is not LAST)
    assert run_code(code).sizes("contiguous") == wanted


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 17)),
        (lambda: nn.Conv2d(4, 6, 3, dilation=2, groups=2), (2, 4, 17, 13)),
        (lambda: nn.Conv2d(4, 6, (1, 5), padding=(0, 2)), (2, 4, 9, 9)),
        (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 9)),
        (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9)),
        (lambda: nn.Conv3d(4, 6, 3, stride=(1, 2, 2)), (2, 4, 5, 9, 9)),
        (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 8)),
        (
            lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dilation=2, groups=2),
            (2, 4, 8, 8),
        ),
        (lambda: nn.ConvTranspose3d(4, 6, 2, stride=2), (2, 4, 3, 3, 3)),
    ],
)
def test_convolution_shapes_are_torchs_own(make, shape):
    real = make()
    expected = real(torch.zeros(shape))
    expected.sum().backward()
    with gpu():
        layer = make().to("cuda")
        x = torch.empty(shape, device="cuda", requires_grad=True)
        out = layer(x)
        assert out.shape == expected.shape
        out.sum().backward()
        assert x.grad.shape == x.shape
        for mine, theirs in zip(layer.parameters(), real.parameters(), strict=True):
            assert mine.grad.shape == theirs.grad.shape


def test_convolution_errors_are_torchs_own():
    with pytest.raises(TraceError, match="channel"):
        run_code(lambda: F.conv2d(cuda(2, 3, 8, 8), cuda(4, 8, 3, 3)))
    with pytest.raises(TraceError, match="Kernel size can't be greater"):
        run_code(lambda: F.conv2d(cuda(2, 8, 2, 2), cuda(4, 8, 3, 3)))


def test_channels_last_network_stays_channels_last():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    shapes = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                shapes.append(x.is_contiguous(memory_format=LAST))
            return x

    run(
        Workload(
            model=Net,
            inputs=lambda b: torch.empty(b, 3, 16, 16),
            loss="sum",
            memory_format="channels_last",
        )
    )
    assert shapes == [True] * 8


RECURRENT = [
    lambda **k: nn.LSTM(8, 16, **k),
    lambda **k: nn.GRU(8, 16, **k),
    lambda **k: nn.RNN(8, 16, **k),
    lambda **k: nn.RNN(8, 16, nonlinearity="relu", **k),
]


@pytest.mark.parametrize("make", RECURRENT)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"num_layers": 2, "dropout": 0.5},
        {"bias": False},
    ],
)
def test_recurrent_layers_run_on_cudnn(make, options):
    real_out, real_state = make(**options)(torch.zeros(5, 3, 8))

    def code():
        layer = make(**options).to("cuda")
        out, state = layer(torch.empty(5, 3, 8, device="cuda"))
        assert out.shape == real_out.shape
        states = zip(
            state if isinstance(state, tuple) else (state,),
            real_state if isinstance(real_state, tuple) else (real_state,),
            strict=True,
        )
        assert all(mine.shape == theirs.shape for mine, theirs in states)
        out.sum().backward()
        assert all(p.grad.shape == p.shape for p in layer.parameters())

    made = run_code(code)
    operators = {s.operator for s in made.storages if s.phase is Phase.FORWARD}
    assert "_cudnn_rnn" in operators
    assert not {"mm", "addmm", "sigmoid", "tanh"} & operators
    assert len(made.storages) < 60  # not one event per time step


def test_lstm_with_projection_and_states():
    def code():
        layer = nn.LSTM(8, 16, proj_size=4).to("cuda")
        h, c = cuda(1, 3, 4), cuda(1, 3, 16)
        out, (h, c) = layer(cuda(5, 3, 8), (h, c))
        assert (out.shape, h.shape, c.shape) == ((5, 3, 4), (1, 3, 4), (1, 3, 16))
        out.sum().backward()

    assert run_code(code).find("_cudnn_rnn")


@pytest.mark.parametrize("make", RECURRENT)
def test_packed_sequences(make):
    def code():
        layer = make().to("cuda")
        packed = pack_padded_sequence(cuda(5, 3, 8), torch.tensor([5, 3, 2]))
        assert packed.data.shape == (10, 8)  # 5 + 3 + 2 rows
        out, _ = layer(packed)
        assert out.data.shape == (10, 16)
        padded, lengths = pad_packed_sequence(out)
        assert padded.shape == (5, 3, 16)
        assert lengths.tolist() == [5, 3, 2]
        padded.sum().backward()

    assert run_code(code).find("_cudnn_rnn")


def test_recurrent_layer_under_autocast():
    def code():
        layer = nn.LSTM(8, 16).to("cuda")
        with torch.autocast("cuda", HALF):
            out, (h, c) = layer(cuda(5, 3, 8))
        assert (out.dtype, h.dtype, c.dtype) == (HALF, HALF, HALF)
        out.float().sum().backward()
        assert {p.grad.dtype for p in layer.parameters()} == {FLOAT}

    run_code(code)


def test_inference_of_an_lstm_reserves_nothing():
    def code(train):
        layer = nn.LSTM(8, 16).to("cuda").train(train)
        with torch.set_grad_enabled(train):
            layer(cuda(5, 3, 8))

    def largest(train):
        return max(run_code(lambda: code(train)).sizes("_cudnn_rnn"))

    assert largest(False) == 5 * 3 * 16 * 4  # the output
    assert largest(True) > 5 * 3 * 16 * 4


# -- values ------------------------------------------------------------------------------------


def test_small_integers_have_their_values():
    with gpu():
        x = torch.arange(6, device="cuda")
        assert x.tolist() == [0, 1, 2, 3, 4, 5]
        assert x[2].item() == 2
        assert int(x.sum()) == 15
        assert bool((x > 3).any())
        assert not bool((x > 3).all())
        assert torch.tensor([3, 4], device="cuda").max().item() == 4
        assert x.view(2, 3).t()[2, 1].item() == 5
        x[1] = 7
        assert x.tolist() == [0, 7, 2, 3, 4, 5]
        x.view(2, 3)[0].fill_(1)
        assert x.tolist() == [1, 1, 1, 3, 4, 5]
        x += 1
        assert x.tolist() == [2, 2, 2, 4, 5, 6]
        assert x.to(torch.int32).cpu().tolist() == [2, 2, 2, 4, 5, 6]


def test_masks_select_as_many_rows_as_they_would():
    with gpu():
        x = torch.arange(6, device="cuda")
        data = cuda(6, 4)
        assert data[x > 3].shape == (2, 4)
        assert data[x > 9].shape == (0, 4)
        assert (x > 3).nonzero().tolist() == [[4], [5]]
        assert torch.where(x > 3)[0].tolist() == [4, 5]
        assert torch.masked_select(x, x > 3).tolist() == [4, 5]
        assert x.unique().tolist() == [0, 1, 2, 3, 4, 5]
        data[x > 3] = 0.0


def test_mask_of_a_mask_is_turned_into_indices_first():
    # CUDA: nonzero gives int64 indices (2 x 1 x 8 = 16), then rows are gathered: 2 x 4 x 4 = 32
    def code():
        x = torch.arange(6, device="cuda")
        return cuda(6, 4)[x > 3]

    made = run_code(code)
    assert made.sizes("nonzero") == [16]
    assert made.sizes("index") == [32]


def test_random_integers_have_values_of_their_own():
    with gpu():
        x = torch.randint(10, (100,), device="cuda")
        assert 0 <= x.min().item() <= x.max().item() < 10
        assert sorted(torch.randperm(5, device="cuda").tolist()) == [0, 1, 2, 3, 4]


def test_finite_checks_are_assumed_to_pass():
    with gpu():
        x = cuda(8, 8)
        assert not x.isnan().any()
        assert not bool(torch.isinf(x).any())
        assert torch.isfinite(x).all()
        assert not (~torch.isfinite(x)).any()


def test_a_number_read_from_a_float_tensor_is_zero_and_noted():
    def code():
        assert cuda(8).sum().item() == 0.0

    made = run_code(code)
    assert [text for text in made.trace.log.notes if "taken as 0" in text]


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x):
        best = self.gate(x).argmax(-1)
        return x[best == 0]


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"router": Router()})

    def forward(self, x):
        return self.body["router"](x)


def test_unknown_size_names_operator_module_and_line():
    workload = Workload(model=Branch, inputs=lambda b: torch.empty(b, 8), loss="sum")
    with pytest.raises(DataDependentError) as caught:
        run(workload)
    message = str(caught.value)
    assert "body.router" in message
    assert "nonzero" in message
    assert "test_rules.py" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "code",
    [
        lambda x: int(x.argmax()),
        lambda x: bool((x > 0).any()),
        lambda x: (x > 0).nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x[x > 0],
        lambda x: x.argmax(-1).tolist(),
        lambda x: x.argmax(-1).numpy(),
        lambda x: x.argmax(-1).unique(),
        lambda x: torch.zeros(4, 4)[x.argmax(-1).cpu() > 2],
    ],
)
def test_unknown_values_are_refused(code):
    with pytest.raises(DataDependentError):
        run_code(lambda: code(cuda(4, 4)))


def test_values_die_with_what_they_depend_on():
    # an integer tensor that is overwritten by something unknown is unknown
    def code():
        x = torch.arange(4, device="cuda")
        x.copy_(cuda(4, 4).argmax(-1))
        x.tolist()

    with pytest.raises(DataDependentError):
        run_code(code)


def test_no_value_is_made_up_for_uninitialized_integers():
    with pytest.raises(DataDependentError):
        run_code(lambda: torch.empty(4, dtype=torch.long, device="cuda").tolist())


def test_user_code_finds_a_gpu():
    with gpu("H100"):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == (9, 0)
        assert "H100" in torch.cuda.get_device_name()
        x = torch.empty(2, device="cuda:0")
        assert x.is_cuda
        assert x.device == torch.device("cuda", 0)
        assert torch.empty(2).cuda().device.type == "cuda"
        assert torch.empty(2).device.type == "cpu"
        assert x.cpu().device.type == "cpu"
        assert x.get_device() == 0
        assert torch.zeros_like(x).is_cuda
        assert x.new_zeros(3).is_cuda
        assert torch.arange(3, device=x.device).is_cuda
        assert not x.new_zeros(3, device="cpu").is_cuda
    with gpu("T4"):
        assert not torch.cuda.is_bf16_supported(including_emulation=False)


def test_host_tensors_take_no_gpu_memory():
    def build(device):
        def step(batch):
            x = torch.empty(batch, 1000)
            x = x * 2
            (x + 1).to(device)

        return step

    made = run_step(build, 8)
    # 8 x 1000 x 4 = 32000: the copy on the GPU only, in each of the two steps
    assert [s.size for s in made.storages] == [32000, 32000]


# -- code that people write ----------------------------------------------------------------------


def grown(*shape):
    return torch.randn(*shape, device="cuda", requires_grad=True)


def train(layer, x, optimizer=None):
    layer = layer.cuda()
    out = layer(x)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    if optimizer is not None:
        made = optimizer(layer.parameters())
        made.step()
        made.zero_grad()


def ctc_loss():
    logits = grown(50, 4, 20).log_softmax(2)
    targets = torch.randint(1, 20, (4, 10), device="cuda")
    F.ctc_loss(logits, targets, torch.full((4,), 50), torch.full((4,), 10)).backward()


def gradient_penalty():
    layer, x = nn.Linear(8, 1).cuda(), grown(2, 8)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    gradient.norm().backward()


def data_loader(shuffle=False):
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8))
    for x, _ in torch.utils.data.DataLoader(data, batch_size=2, shuffle=shuffle):
        x.cuda() + 1


WEIGHTS = io.BytesIO()
torch.save({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, WEIGHTS)


def load_weights():
    file = io.BytesIO(WEIGHTS.getvalue())
    nn.Linear(2, 2).load_state_dict(torch.load(file))


def padded_transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).cuda()
    padding = torch.zeros(2, 5, dtype=torch.bool, device="cuda")
    model(grown(2, 5, 16), src_key_padding_mask=padding).sum().backward()


def causal_transformer():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).cuda()
    mask = model.generate_square_subsequent_mask(6, device="cuda")
    model(grown(2, 5, 16), grown(2, 6, 16), tgt_mask=mask).sum().backward()


def scheduler():
    layer = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    layer(grown(2, 8)).sum().backward()
    optimizer.step()
    schedule.step()


def streams():
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        grown(2)
    torch.cuda.Event(enable_timing=True).record()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0


def printing():
    x = grown(2, 2)
    assert "size=(2, 2)" in repr(x)
    assert "grad_fn" in str(x.sum())
    assert f"{x.sum().item():.2f}"


def numpy_and_back():
    import numpy as np

    assert grown(2, 3).detach().cpu().numpy().shape == (2, 3)
    assert torch.from_numpy(np.ones((2, 3), dtype="float32")).cuda().is_cuda


def state_dicts():
    layer = nn.Linear(8, 8).cuda()
    layer.load_state_dict({k: v.cpu().clone() for k, v in layer.state_dict().items()})


CODE = {
    "attention": lambda: nn.MultiheadAttention(8, 2).cuda()(*[grown(5, 2, 8)] * 3)[0].sum(),
    "causal transformer": causal_transformer,
    "cdist": lambda: torch.cdist(grown(3, 4), grown(5, 4)).sum().backward(),
    "cholesky": lambda: torch.linalg.cholesky(grown(4, 4)).sum().backward(),
    "distributions": lambda: torch.distributions.Normal(grown(3), torch.ones(3).cuda()).rsample(),
    "embedding bag": lambda: nn.EmbeddingBag(10, 4).cuda()(torch.ones(2, 3).long().cuda()).sum(),
    "fft": lambda: torch.fft.rfft2(grown(2, 8, 8)).abs().sum().backward(),
    "gradient penalty": gradient_penalty,
    "grid sample": lambda: F.grid_sample(grown(1, 2, 8, 8), grown(1, 4, 4, 2), align_corners=False),
    "group norm": lambda: train(nn.GroupNorm(2, 4), grown(2, 4, 3, 3)),
    "gumbel": lambda: F.gumbel_softmax(grown(4, 4), hard=True).sum().backward(),
    "instance norm": lambda: train(nn.InstanceNorm2d(4, affine=True), grown(2, 4, 3, 3)),
    "lstm cell": lambda: train(nn.LSTMCell(4, 4), grown(2, 4)),
    "numpy": numpy_and_back,
    "one hot": lambda: F.one_hot(torch.arange(5, device="cuda")).float() @ grown(5, 3),
    "padded transformer": padded_transformer,
    "printing": printing,
    "repeat": lambda: grown(4, 3).repeat_interleave(torch.tensor([1, 2, 3, 4]).cuda(), 0),
    "rms norm": lambda: train(nn.RMSNorm(8), grown(2, 8)),
    "scatter": lambda: torch.zeros(4, 8).cuda().index_add_(0, torch.ones(6).long(), grown(6, 8)),
    "scheduler": scheduler,
    "seeds": lambda: (torch.manual_seed(0), torch.cuda.manual_seed_all(0)),
    "state dicts": state_dicts,
    "streams": streams,
    "svd": lambda: torch.linalg.svd(grown(4, 4))[1].sum().backward(),
    "sync batch norm": lambda: nn.SyncBatchNorm(4).cuda()(grown(2, 4, 3, 3)),
    "topk": lambda: grown(4, 10).topk(3).values.sum().backward(),
    "torch.func": lambda: torch.func.grad(lambda w: (w * w).sum())(grown(3).detach()),
    "unfold": lambda: F.unfold(grown(2, 4, 9, 9), 3).sum().backward(),
    "upsample": lambda: F.interpolate(grown(2, 4, 9, 9), scale_factor=2, mode="bilinear"),
    "vmap": lambda: torch.vmap(lambda a, b: (a * b).sum())(grown(4, 3), grown(4, 3)),
    "weight norm": lambda: train(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), grown(2, 8)
    ),
    "fused adamw": lambda: train(
        nn.Linear(8, 8), grown(2, 8), lambda p: torch.optim.AdamW(p, fused=True)
    ),
    "ctc loss": ctc_loss,
    "data loader": data_loader,
    "data loader, shuffled": lambda: data_loader(True),
    "torch.load": load_weights,
    "nan_to_num": lambda: torch.nan_to_num(grown(3)).sum().backward(),
    "fused sgd": lambda: train(
        nn.Linear(8, 8), grown(2, 8), lambda p: torch.optim.SGD(p, fused=True)
    ),
    "fused adagrad": lambda: train(
        nn.Linear(8, 8), grown(2, 8), lambda p: torch.optim.Adagrad(p, fused=True)
    ),
    "memory statistics": lambda: torch.cuda.memory_summary(),
    "generator": lambda: torch.randn(3, generator=torch.Generator(device="cuda"), device="cuda"),
    "batch accuracy": lambda: (nn.Linear(8, 8).cuda()(grown(2, 8)).argmax(1) == 0).sum().item(),
}


@pytest.mark.parametrize("name", CODE)
def test_code_that_people_write(name):
    run_code(CODE[name])
