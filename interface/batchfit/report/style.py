"""Colours and settings of the figures: for print, for dark mode, for every eye."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib as mpl

from batchfit.estimator import Category

Theme = Literal["light", "dark"]

# Paul Tol, "Colour Schemes", SRON/EPS/TN/09-002 issue 3.2 (2021), figure 4: the muted scheme is
# distinct in every form of colour blindness and in print.
CATEGORY_COLOURS: dict[Category, str] = {
    Category.PARAMETERS: "#332288",
    Category.BUFFERS: "#88CCEE",
    Category.GRADIENTS: "#44AA99",
    Category.OPTIMIZER_STATE: "#117733",
    Category.INPUTS: "#999933",
    Category.ACTIVATIONS: "#DDCC77",
    Category.AUTOCAST_COPIES: "#CC6677",
    Category.TEMPORARIES: "#882255",
    Category.WORKSPACE: "#AA4499",
}
# The same source, figure 1: the bright scheme, for lines.
LINES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")

_INK = {"light": "#1f2328", "dark": "#e6edf3"}
_FAINT = {"light": "#d0d7de", "dark": "#3d444d"}
_PAPER = {"light": "#ffffff", "dark": "#0d1117"}


@contextmanager
def themed(theme: Theme) -> Iterator[str]:
    """Within the block figures are made in a theme; yields the colour of its text."""
    ink, faint, paper = _INK[theme], _FAINT[theme], _PAPER[theme]
    settings: dict[Any, Any] = {
        "figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper,
        "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink,
        "ytick.color": ink, "grid.color": faint, "legend.edgecolor": faint,
        "legend.facecolor": paper, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "font.size": 10,
        "svg.fonttype": "none", "figure.constrained_layout.use": True, "svg.hashsalt": "batchfit",
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield ink
