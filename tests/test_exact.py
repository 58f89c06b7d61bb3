"""Bytes that can be worked out by hand, or that were measured on a GPU: exact, no tolerance.

The tensors of the hand-made cases are at most 1 MiB and multiples of 512 bytes (scalars take a
block of 512), so allocated bytes are sums of block sizes. M, K and so on name shapes; all
tensors are fp32 unless the comment says so.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfit.estimator import Category, Phase, Workload, estimate

from .helpers import A100, MIB, quick, run, run_step

FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
KINDS = Category


def net(*layers):
    """A function that makes a Sequential of fresh layers (each given as a function)."""
    return lambda: nn.Sequential(*(layer() for layer in layers))


def activations(made, step=1, exclude=("ones_like",)):
    """(operator, bytes) of what the forward pass of a step made and backward still needs."""
    return [
        (s.operator, s.size)
        for s in made.alive(BACKWARD, step)
        if s.phase is FORWARD
        and s.step == step
        and s.category is KINDS.ACTIVATIONS
        and s.operator not in exclude
    ]


# -- numbers measured by others on a real GPU ---------------------------------------------------


def test_cross_entropy_twice_as_measured_on_an_a100():
    # logits 16384 x 4096 x 4 = 268435456; the same again for: gradient, log-softmax, its input
    # gradient, and nll_loss_backward: 5 x 268435456 = 1342177280. Targets 16384 x 8 = 131072.
    # loss and its gradient 512 each; so 1342177280 + 131072 + 2 x 512 = 1342309376.
    def build(device):
        logits = torch.randn(16384, 4096, device=device, requires_grad=True)
        target = torch.randint(4096, (16384,), device=device)

        def step(batch):
            F.cross_entropy(logits, target).backward()

        return step

    made = estimate(Workload.from_step(build), gpu=A100)
    assert made.peak(2) == 1342309376
    assert made.peak(64) == 1342309376  # nothing depends on the batch


def test_amp_recipe_in_fp32_as_measured_on_a_t4():
    # 50 x (512 x 4096 x 4 = 8388608) of data and the same of targets = 838860800.
    # Three layers of 4096 x 4096 x 4 + 4096 x 4 = 67125248: parameters and gradients
    # 6 x 67125248 = 402751488. The peak is in the backward pass of the last layer's neighbour: a
    # new weight and bias gradient beside the kept ones (67125248), five tensors of 8388608 (both
    # ReLUs, the output, the gradients of the output and of its input), loss and its gradient (512
    # each): 838860800 + 7 x 67125248 + 5 x 8388608 + 1024 = 1350681600, as the GPU reported.
    def build(device):
        data = [torch.randn(512, 4096, device=device) for _ in range(50)]
        targets = [torch.randn(512, 4096, device=device) for _ in range(50)]
        layers = [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(4096, 4096)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        loss_function = nn.MSELoss().cuda()

        def step(batch):
            for x, y in zip(data, targets, strict=True):
                output = model(x)  # the name keeps it alive until the next one is made
                loss = loss_function(output, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

        return step

    made = estimate(Workload.from_step(build), gpu="T4", workspaces=False)
    assert made.peak(2) == 1350681600


@pytest.mark.parametrize(
    ("workspaces", "expected"),
    [
        # weight 4 MiB + input 512 x 1024 x 4 = 2 MiB + output 2 MiB
        (False, 8 * MIB),
        # and the cuBLAS workspace of 4096 KiB x 2 + 16 KiB x 8 = 8.125 MiB
        (True, 8 * MIB + 8519680),
    ],
)
def test_forward_of_a_linear_layer(workspaces, expected):
    def build(device):
        layer = nn.Linear(1024, 1024, bias=False, device=device)
        x = torch.randn(1, 512, 1024, device=device)

        def step(batch):
            layer(x)

        return step

    made = estimate(Workload.from_step(build), gpu=A100, workspaces=workspaces)
    assert made.peak(2) == expected


# -- one layer, phase by phase ------------------------------------------------------------------


def linear(**options):
    return Workload(
        model=lambda: nn.Linear(256, 128),
        inputs=lambda b: torch.empty(b, 256),
        loss="mse",
        **{"optimizer": "adamw", **options},
    )


# Linear(256, 128): weight 256 x 128 x 4 = 131072, bias 128 x 4 = 512.
WEIGHTS = 131072 + 512
# Batch 64: input 64 x 256 x 4 = 65536, output 64 x 128 x 4 = 32768, target as output, loss 512.
X, Y, LOSS = 65536, 32768, 512


def test_linear_phases():
    made = run(linear(), 64)
    peaks = made.peaks()
    assert peaks[Phase.INIT] == WEIGHTS
    # Backward: gradient of the loss (512), of the output, of the weights; all of the forward pass
    # is still there. With the optimizer's state of the first step (2 x weights): the second step.
    held = WEIGHTS + X + 2 * Y + LOSS
    # The second forward pass makes a new output while the old one still has its name: the old
    # loss and output die when the new ones are assigned, so one more output in the second step.
    assert peaks[BACKWARD] == held + 2 * WEIGHTS + (512 + Y + WEIGHTS)
    # AdamW's foreach path keeps sqrt(exp_avg_sq) of all parameters: one more copy of the weights.
    assert peaks[OPTIMIZER] == held + WEIGHTS + 2 * WEIGHTS + WEIGHTS
    assert made.peak == max(peaks.values())


def test_linear_is_the_same_through_the_allocator():
    made = quick(linear())
    assert made.peak(64) == 6 * WEIGHTS  # 5 of weights + X + 2 Y + LOSS (= 131584, as it happens)
    assert made.breakdown(64) == {
        KINDS.PARAMETERS: WEIGHTS,
        KINDS.GRADIENTS: WEIGHTS,
        KINDS.OPTIMIZER_STATE: 2 * WEIGHTS,
        KINDS.INPUTS: X + Y,
        KINDS.ACTIVATIONS: Y + LOSS,
        KINDS.TEMPORARIES: WEIGHTS,
    }


@pytest.mark.parametrize(
    ("spec", "state", "temporaries"),
    [
        # foreach is the default on CUDA: sqrt(exp_avg_sq) of every parameter at once
        ("adamw", 2, WEIGHTS),
        ("adamw:foreach=True", 2, WEIGHTS),
        # one kernel does it all; the step counters are on the device: 2 x 512
        ("adamw:fused=True", 2, 0),
        # one parameter at a time: sqrt(v), sqrt(v) / correction, + eps in place: two of the largest
        ("adamw:foreach=False", 2, 2 * 131072),
        # amsgrad keeps a third state; the temporary is sqrt(max_exp_avg_sq)
        ("adamw:amsgrad=True", 3, WEIGHTS),
    ],
)
def test_optimizer_step(spec, state, temporaries):
    made = run(linear(optimizer=spec), 64)
    counters = 2 * 512 if "fused" in spec else 0
    held = WEIGHTS + X + 2 * Y + LOSS + WEIGHTS + state * WEIGHTS + counters
    assert made.peaks()[OPTIMIZER] == held + temporaries
    sizes = [s.size for s in made.storages if s.category is KINDS.OPTIMIZER_STATE]
    assert sum(-(-size // 512) * 512 for size in sizes) == state * WEIGHTS + counters


def test_plain_sgd_allocates_nothing():
    # p.add_(grad): no temporary, no state
    made = run(linear(optimizer="sgd:momentum=0"), 64)
    assert not made.find(phase=OPTIMIZER)
    assert not made.find(category=KINDS.OPTIMIZER_STATE)


def test_sgd_momentum_keeps_one_copy_of_the_gradients():
    made = run(linear(optimizer="sgd"), 64)
    states = [s.size for s in made.storages if s.category is KINDS.OPTIMIZER_STATE]
    assert states == [131072, 512]
    # buffers stay, nothing else is made: weights + gradients + buffers + the rest of the step
    assert made.peaks()[OPTIMIZER] == 3 * WEIGHTS + X + 2 * Y + LOSS


def test_no_optimizer():
    made = run(linear(optimizer=None), 64)
    assert OPTIMIZER not in made.peaks()
    assert made.peak == WEIGHTS + X + 2 * Y + LOSS + 512 + Y + WEIGHTS


def test_inference_keeps_nothing():
    made = run(linear(inference=True), 64)
    # The second step computes a new output while the last one still has its name.
    assert made.peak == WEIGHTS + X + 2 * Y
    assert not made.find(category=KINDS.GRADIENTS)


# -- what is saved for backward -----------------------------------------------------------------


def saved(make, shape, loss="sum", batch=8, **options):
    """What the forward pass of one network leaves for its backward pass."""
    workload = Workload(
        model=make, inputs=lambda b: torch.empty(b, *shape), loss=loss, optimizer=None, **options
    )
    return activations(run(workload, batch))


def test_mlp_saves_the_inputs_of_its_layers():
    layers = net(lambda: nn.Linear(128, 64), nn.ReLU, lambda: nn.Linear(64, 32), nn.ReLU)
    # 8 x 64 x 4 = 2048: only the result of ReLU (saved by it and by the next layer), never the
    # output of the first layer itself; 8 x 32 x 4 = 1024; sum 4.
    assert saved(layers, (128,)) == [("relu", 2048), ("relu", 1024), ("sum", 4)]


def test_inplace_relu_makes_no_storage():
    layers = net(lambda: nn.Linear(128, 64), lambda: nn.ReLU(inplace=True))
    assert saved(layers, (128,)) == [("addmm", 2048), ("sum", 4)]


def test_gelu_saves_its_input():
    layers = net(lambda: nn.Linear(128, 64), nn.GELU, lambda: nn.Linear(64, 64))
    # gelu saves what it got, the next layer what gelu gave
    found = [("addmm", 2048), ("gelu", 2048), ("addmm", 2048), ("sum", 4)]
    assert saved(layers, (128,)) == found


def test_dropout_saves_a_mask_of_one_byte():
    layers = net(lambda: nn.Linear(128, 64), lambda: nn.Dropout(0.5), lambda: nn.Linear(64, 64))
    # output 8 x 64 x 4 = 2048, mask 8 x 64 x 1 = 512
    found = [("native_dropout", 2048), ("native_dropout", 512), ("addmm", 2048), ("sum", 4)]
    assert saved(layers, (128,)) == found


def test_dropout_of_zero_and_in_evaluation_makes_nothing():
    layers = net(lambda: nn.Linear(128, 64), lambda: nn.Dropout(0.0))
    assert saved(layers, (128,))[0] == ("addmm", 2048)

    def build(device):
        model = nn.Sequential(nn.Linear(128, 64), nn.Dropout(0.5)).to(device).eval()
        return lambda batch: model(torch.empty(batch, 128, device=device)).sum().backward()

    assert not run_step(build, 8).find("native_dropout")


def test_layer_norm_saves_its_input_and_two_numbers_per_row():
    layers = net(lambda: nn.Linear(128, 64), lambda: nn.LayerNorm(64))
    # rows (8, 4): input and output 8 x 4 x 64 x 4 = 8192, mean and 1 / deviation 32 x 4 = 128
    found = [("addmm", 8192), ("native_layer_norm", 8192)]
    found += [("native_layer_norm", 128), ("native_layer_norm", 128), ("sum", 4)]
    assert saved(layers, (4, 128)) == found


def test_max_pool_saves_int64_indices():
    layers = net(lambda: nn.Conv2d(3, 4, 1), lambda: nn.MaxPool2d(2))
    # conv 8 x 4 x 16 x 16 x 4 = 32768; pooled a quarter: 8192; indices 8 bytes each: 16384
    name = "max_pool2d_with_indices"
    found = [("convolution", 32768), (name, 8192), (name, 16384), ("sum", 4)]
    assert saved(layers, (3, 16, 16)) == found


def test_batch_norm_saves_its_input_and_two_numbers_per_channel():
    layers = net(lambda: nn.Conv2d(3, 64, 1), lambda: nn.BatchNorm2d(64))
    # 8 x 64 x 4 x 4 x 4 = 32768 in and out; mean and 1 / deviation 64 x 4 = 256 each; the reserve
    # space of cuDNN is empty
    name = "cudnn_batch_norm"
    found = [("convolution", 32768), (name, 32768), (name, 256), (name, 256), ("sum", 4)]
    assert [s for s in saved(layers, (3, 4, 4)) if s[1]] == found


def test_two_norms_of_one_input_share_it():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(128, 64)
            self.one, self.two = nn.LayerNorm(64), nn.LayerNorm(64)

        def forward(self, x):
            x = self.first(x)
            return self.one(x), self.two(x)

    sizes = [size for _, size in saved(Twice, (128,))]
    # 2048 of input once, 2048 of output twice, statistics 8 x 4 = 32 four times, sum 4
    assert sorted(sizes) == [4, 32, 32, 32, 32, 2048, 2048, 2048]


def test_attention_scores_are_saved_where_they_are_written_out():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(1, 2)).softmax(-1) @ v

    # x (8, 16, 64); qkv 8 x 16 x 192 x 4 = 98304; softmax 8 x 16 x 16 x 4 = 8192 (the scores
    # themselves are not kept); out 8 x 16 x 64 x 4 = 32768. torch copies the views of qkv for bmm
    # where their strides do not fit: here they do.
    found = saved(Attention, (16, 64))
    assert ("_softmax", 8192) in found
    assert [size for _, size in found] == [98304, 8192, 32768, 4]


# -- gradients ----------------------------------------------------------------------------------


def test_embedding_gradient_is_dense():
    def build(device):
        table = nn.Embedding(1000, 32, device=device)
        tokens = torch.randint(1000, (4, 8), device=device)

        def step(batch):
            table(tokens).sum().backward()
            table.zero_grad()

        return step

    made = run_step(build)
    # 1000 x 32 x 4 = 128000 whatever the number of tokens
    assert set(made.sizes(category=KINDS.GRADIENTS)) == {128000}


def test_frozen_parameters_have_neither_gradient_nor_state():
    def make():
        model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32))
        model[0].requires_grad_(False)
        return model

    workload = Workload(model=make, inputs=lambda b: torch.empty(b, 128), loss="mse")
    made = run(workload, 8)
    assert set(made.sizes(category=KINDS.GRADIENTS)) == {64 * 32 * 4, 32 * 4}
    states = made.sizes(category=KINDS.OPTIMIZER_STATE)
    assert sorted(states) == [128, 128, 8192, 8192]  # exp_avg and exp_avg_sq of the last layer


def test_tied_weight_has_one_storage_and_one_gradient():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 64)
            self.head = nn.Linear(64, 100, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    workload = Workload(
        model=Tied, inputs=lambda b: torch.zeros(b, 4, dtype=torch.long), loss="cross_entropy"
    )
    made = run(workload, 8)
    assert made.sizes(category=KINDS.PARAMETERS) == [25600]  # 100 x 64 x 4
    # Two steps; in each, both uses make a gradient of 25600, the engine adds them in a third
    # storage or in place: what is kept is one.
    kept = [s for s in made.alive(OPTIMIZER, 1) if s.size == 25600]
    assert [s.category for s in kept] == [KINDS.PARAMETERS, KINDS.GRADIENTS]


def test_accumulated_gradients_stay_and_are_added_to():
    made = run(linear(accumulate=3, optimizer="sgd:momentum=0"), 64)
    grads = made.find(category=KINDS.GRADIENTS, step=1)
    assert [s.size for s in grads] == [131072, 512]  # born in the first micro-batch only
    # In the later micro-batches the new weight gradient lives beside the kept one; the outputs of
    # the micro-batch before are gone by then.
    assert made.peaks()[BACKWARD] == 2 * WEIGHTS + X + 2 * Y + LOSS + 512 + Y + WEIGHTS


def test_accumulation_costs_one_gradient_of_the_peak():
    once = run(linear(optimizer="sgd:momentum=0"), 64).peaks()[BACKWARD]
    twice = run(linear(optimizer="sgd:momentum=0", accumulate=2), 64).peaks()[BACKWARD]
    assert twice - once == WEIGHTS


def test_zeroed_gradients_live_through_the_forward_pass():
    kept = run(linear(optimizer="sgd:momentum=0", set_to_none=False), 64)
    dropped = run(linear(optimizer="sgd:momentum=0"), 64)
    grads = [131072, 512]
    assert [s.size for s in kept.alive(BACKWARD, 2) if s.category is KINDS.GRADIENTS] == grads
    assert not [s for s in dropped.alive(BACKWARD, 2) if s.category is KINDS.GRADIENTS]
    assert kept.peaks()[FORWARD] - dropped.peaks()[FORWARD] <= WEIGHTS
    assert kept.peaks()[BACKWARD] - dropped.peaks()[BACKWARD] == WEIGHTS


def test_ema_is_one_more_copy_of_the_weights():
    plain = run(linear(optimizer="sgd:momentum=0"), 64)
    made = run(linear(optimizer="sgd:momentum=0", ema=True), 64)
    # the weights again; AveragedModel makes its counter on the host
    assert made.peaks()[Phase.INIT] - plain.peaks()[Phase.INIT] == WEIGHTS
    assert made.peaks()[BACKWARD] - plain.peaks()[BACKWARD] == WEIGHTS


def test_clipping_makes_norms_of_every_gradient():
    made = run(linear(optimizer="sgd:momentum=0", clip_grad_norm=1.0), 64)
    plain = run(linear(optimizer="sgd:momentum=0"), 64)
    # One number per parameter, their stack (2 x 4), the total: nothing near the peak.
    norms = [s for s in made.storages if s.operator.endswith("norm") and s.step == 1]
    assert [s.size for s in norms] == [4, 4, 4]
    assert made.sizes("stack", step=1) == [8]
    assert made.peak == plain.peak


# -- mixed precision ----------------------------------------------------------------------------


def test_grad_scaler_keeps_two_numbers_and_scales_the_loss():
    made = run(linear(precision="amp-fp16", optimizer="sgd:momentum=0"), 64)
    # the scale (float) and the growth tracker (int32): born at the first use, there to the end
    kept = made.find("full", death=None)
    assert [(s.size, s.step) for s in kept] == [(4, 1), (4, 1)]
    # the scaled loss and its gradient die with the step
    assert made.sizes("mul", step=1, phase=FORWARD) == [4]
    # found_inf: one more number per step
    assert len(made.find("full", step=2)) == 1


def amp(model, shape, precision="amp-fp16", **options):
    return Workload(
        model=model,
        inputs=lambda b: torch.empty(b, *shape),
        precision=precision,
        optimizer=None,
        **{"loss": "sum", **options},
    )


@pytest.mark.parametrize("precision", ["amp-fp16", "amp-bf16"])
def test_autocast_copies_live_until_the_context_ends(precision):
    layers = net(lambda: nn.Linear(128, 64), nn.ReLU, lambda: nn.Linear(64, 32))
    made = run(amp(layers, (128,), precision), 8)
    copies = made.find(category=KINDS.AUTOCAST_COPIES, step=1)
    # half of each weight and bias, in the order in which the casts are made (input aside)
    assert [s.size for s in copies] == [128 * 64 * 2, 64 * 2, 64 * 32 * 2, 32 * 2]
    backward = made.start(BACKWARD, 1)
    # The first layer's copy is not saved by anything (its input needs no gradient): it dies with
    # the context, before backward. The second layer's weight is needed for the input gradient.
    alive = [s.size for s in copies if s.alive_at(backward)]
    assert alive == [64 * 32 * 2]


def test_activations_are_half_under_autocast():
    layers = net(lambda: nn.Linear(128, 64), nn.ReLU, lambda: nn.Linear(64, 32))
    made = run(amp(layers, (128,)), 8)
    # input cast 8 x 128 x 2 = 2048, relu 8 x 64 x 2 = 1024, output 8 x 32 x 2 = 512; the sum is
    # computed in fp32 without a copy of its input: 4
    found = [s for s in activations(made) if s[0] not in ("mul", "full", "fill")]
    assert found[:3] == [("_to_copy", 2048), ("relu", 1024), ("addmm", 512)]
    assert ("sum", 4) in found


def test_tied_weight_is_cast_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(self.layer(x))

    made = run(amp(Twice, (64,)), 8)
    assert made.sizes(category=KINDS.AUTOCAST_COPIES, step=1) == [64 * 64 * 2, 64 * 2]


def test_autocast_without_cache_casts_each_time():
    def build(device):
        layer = nn.Linear(64, 64, device=device)

        def step(batch):
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                x = torch.empty(batch, 64, device=device)
                layer(layer(x)).sum().backward()
            layer.zero_grad()

        return step

    made = run_step(build, 8)
    assert not made.find(category=KINDS.AUTOCAST_COPIES)
    # weight twice
    assert made.sizes("_to_copy", step=1, phase=FORWARD).count(64 * 64 * 2) == 2


def test_half_weights_halve_everything():
    made = run(linear(precision="bf16", optimizer="sgd:momentum=0"), 64)
    # 131072 / 2 + bias 256 in a block of 512; input, output, target halved
    weights = 65536 + 512
    assert made.peaks()[Phase.INIT] == weights
    backward = 2 * weights + X // 2 + Y + 512 + 512 + Y // 2
    assert made.peaks()[BACKWARD] == backward


# -- checkpointing ------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(64, 64)
        make = net(lambda: nn.Linear(64, 256), nn.GELU, lambda: nn.Linear(256, 64))
        self.blocks = nn.ModuleList([make() for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_keep_their_inputs_only(reentrant):
    # 8 x 64 x 4 = 2048: the input of each block, and the last output
    found = saved(lambda: Blocks(reentrant), (64,))
    assert [s for s in found if s[1] >= 512] == [("addmm", 2048)] * 4
    # without checkpointing: Linear(64, 256) 8 x 256 x 4 = 8192 and gelu 8192 of each block as well
    plain = saved(lambda: Blocks(None), (64,))
    assert sum(size for _, size in plain) - sum(size for _, size in found) == 3 * 2 * 8192


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_recomputed_in_backward(reentrant):
    workload = Workload(
        model=lambda: Blocks(reentrant),
        inputs=lambda b: torch.empty(b, 64),
        loss="sum",
        optimizer=None,
    )
    made = run(workload, 8)
    # one gelu per block in the forward pass (dead before backward) and one in the backward pass
    assert made.sizes("gelu", step=1, phase=FORWARD) == [8192] * 3
    assert made.sizes("gelu", step=1, phase=BACKWARD) == [8192] * 3
    backward = made.start(BACKWARD, 1)
    assert not [s for s in made.find("gelu", phase=FORWARD) if s.alive_at(backward)]


# -- what the loop keeps ------------------------------------------------------------------------


def test_outputs_of_the_last_step_live_until_reassigned():
    made = run(linear(optimizer="sgd:momentum=0"), 64)
    output = made.find("addmm", step=1)[0]
    assert made.timeline.phase_at(output.death) == (FORWARD, 2)
    assert output.death > made.find("addmm", step=2)[0].birth


def test_evaluation_pass_adds_no_activations():
    layers = net(lambda: nn.Linear(128, 64), nn.ReLU, lambda: nn.Linear(64, 32))
    base = Workload(model=layers, inputs=lambda b: torch.empty(b, 128), loss="mse")
    plain, made = run(base, 8), run(base.with_(evaluate=True), 8)
    assert made.peak == plain.peak
    assert len(made.find("relu", step=1)) == 2  # once in training, once in evaluation


@pytest.mark.parametrize(("gpu", "size"), [("T4", 8519680), (A100, 8519680), ("H100", 33554432)])
def test_training_has_two_cublas_workspaces(gpu, size):
    made = run(linear(), 64, gpu, workspaces=True)
    # one for the thread that runs the forward pass, one for the autograd engine's
    found = [s for s in made.find(category=KINDS.WORKSPACE) if s.size]
    assert [s.size for s in found] == [size, size]
    assert [s.phase for s in found] == [FORWARD, BACKWARD]
    assert [s.death for s in found] == [None, None]


def test_workspace_setting_of_the_environment(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    made = run(linear(inference=True), 64, workspaces=True)
    found = [size for size in made.sizes(category=KINDS.WORKSPACE) if size]
    assert found == [16 * 1024 * 8]
