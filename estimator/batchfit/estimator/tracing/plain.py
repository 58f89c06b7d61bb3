"""torch as it is, in the middle of a trace."""

from __future__ import annotations

from typing import Any

import torch


class PlainTorch:
    """Within the block neither dispatch modes nor function modes of this thread are active."""

    def __enter__(self) -> None:
        self._guards: tuple[Any, ...] = (
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
        )
        for guard in self._guards:
            if hasattr(guard, "__enter__"):
                guard.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for guard in reversed(self._guards):
            if hasattr(guard, "__exit__"):
                guard.__exit__(*exc)
        self._guards = ()
