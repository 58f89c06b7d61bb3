"""How a DataLoader reads during a trace."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter


def one_process(loader: DataLoader[Any]) -> Any:
    """In place of ``DataLoader._get_iterator``: read in this process, and pin nothing.

    Worker processes and the thread that pins memory do not see the trace; the loader itself is left
    as it is.
    """
    plain = copy.copy(loader)
    plain.__dict__.update(
        num_workers=0, pin_memory=False, timeout=0, prefetch_factor=None,
        persistent_workers=False, multiprocessing_context=None,
    )  # fmt: skip
    return _SingleProcessDataLoaderIter(plain)
