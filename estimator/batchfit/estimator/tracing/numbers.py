"""A number that only real data can give."""

from __future__ import annotations

from typing import Any, NoReturn

from batchfit.estimator.errors import DataDependentError


class UnknownNumber:
    """What ``item()`` gives for an integer that is not known: a count of right answers, say.

    It may be added up, averaged and printed, as statistics are. As soon as it would decide
    something (a size, a branch, a loop) it raises, and names the place where it was read.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def _refuse(self, *_: Any) -> NoReturn:
        raise DataDependentError(
            f"{self._where} reads a number that only real data can give, and the step then depends "
            "on it (a size, a branch or a loop); pass inputs whose values are known, or give the "
            "workload a step that does not depend on it"
        )

    def _same(self, *_: Any) -> UnknownNumber:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __neg__ = __pos__ = __abs__ = __round__ = _same
    __bool__ = __index__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __iter__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __float__(self) -> float:
        return 0.0

    def __repr__(self) -> str:
        return "unknown"

    def __format__(self, _: str) -> str:
        return "unknown"
