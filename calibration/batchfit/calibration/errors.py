"""The errors of calibration, beside those of :mod:`batchfit.estimator.errors`.

::

    BatchfitError
    └── CalibrationError      probes cannot be made, or do not tell what was asked
        └── StaleCalibration  a saved calibration belongs to another job, device or software

What a user's step raises, and is not out of memory, is never wrapped: it arrives as it is.
"""

from __future__ import annotations

from batchfit.estimator.errors import BatchfitError

__all__ = ["CalibrationError", "StaleCalibration"]


class CalibrationError(BatchfitError):
    """The step or the device does not allow a calibration: what was seen, and what to do."""


class StaleCalibration(CalibrationError):
    """A saved calibration does not apply here; names what changed."""
