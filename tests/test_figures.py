"""The figures show the numbers of the estimate, in both themes, and leave matplotlib alone."""

import pytest

pytest.importorskip("matplotlib")

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from batchfit.estimator import Category, Phase, Workload, WorkloadError, estimate
from batchfit.report import feasibility, memory_over_batch, memory_over_step
from batchfit.report.style import CATEGORY_COLOURS, themed

GIB = 2**30


@pytest.fixture(scope="module")
def made():
    layers = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(),
                                 torch.nn.Linear(2048, 512))  # fmt: skip
    job = Workload(model=layers, inputs=torch.empty(1, 512), loss="sum", optimizer="adamw")
    return estimate(job, gpu="T4")


def texts(figure: Figure) -> str:
    return " ".join(t.get_text() for t in figure.findobj(mpl.text.Text))


def test_every_category_has_a_colour_of_its_own():
    assert set(CATEGORY_COLOURS) == set(Category)
    assert len(set(CATEGORY_COLOURS.values())) == len(Category)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_memory_over_a_step(made, theme):
    figure = memory_over_step(made, 4096, theme=theme)
    (axes,) = figure.axes
    curve = made.timeline(4096)
    start = next(p for p, _, step in curve.marks if step == 2)
    top = max(path.vertices[:, 1].max() for c in axes.collections for path in c.get_paths())
    assert top == pytest.approx(curve.allocated[start:].max() / GIB)
    said = texts(figure)
    assert all(str(phase) in said for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
    assert "activations" in said and "GiB" in said
    figure.draw_without_rendering()


def test_a_step_that_was_not_traced(made):
    with pytest.raises(WorkloadError, match="other steps than 7"):
        memory_over_step(made, 4, step=7)


def test_memory_over_the_batch(made):
    figure = memory_over_batch(made, ["t4", "rtx-3090"], largest=1000)
    (axes,) = figure.axes
    line = axes.lines[0]
    batches = line.get_xdata()
    assert [made.peak(int(b)) / GIB for b in batches] == pytest.approx(list(line.get_ydata()))
    assert f"T4: {made.answer().batch}" in texts(figure)
    figure.draw_without_rendering()


def test_a_map_of_batch_and_length():
    figure = feasibility(lambda n: 1024 // n, [128, 256, 512], [1, 4, 8])
    (axes,) = figure.axes
    cells = [t.get_text() for t in axes.texts]
    assert cells == ["fits"] * 3 + ["fits", "fits", "no"] + ["fits", "no", "no"]
    with pytest.raises(WorkloadError, match="at least one length"):
        feasibility(lambda n: 1, [], [1])


def test_nothing_global_changes(made):
    before = dict(mpl.rcParams)
    memory_over_step(made, 8, theme="dark")
    with pytest.raises(RuntimeError), themed("dark"):
        raise RuntimeError
    assert dict(mpl.rcParams) == before
