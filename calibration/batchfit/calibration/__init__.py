"""Measured calibration of an estimate on a real device.

Empty for now: probes, fit and store come on top of :mod:`batchfit.estimator`, which they import
and which never imports them.
"""
