"""A probe in a process of its own: what it breaks, or leaves behind, is gone with the process."""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from typing import Any

from .errors import CalibrationError
from .job import Job
from .meters import Meter, find_meter
from .probe import Probe
from .probes import ProbeOptions, run_probe

__all__ = ["isolated"]


def isolated(
    job: Job, meter: Meter, batch: int, budget: int, options: ProbeOptions | None = None
) -> Probe:
    """:func:`run_probe` in a fresh process, which imports everything anew.

    Raises:
        CalibrationError: the job cannot be sent to another process, or that process died.
        Whatever the step raises there that is not out of memory.
    """
    order = (job.work, str(meter.device), meter.limit, batch, budget, options)
    try:
        sent = pickle.dumps(order)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CalibrationError(
            f"the job cannot be sent to a process of its own ({error}); define its model, inputs "
            "and step as functions at the top of a module, or leave isolate off"
        ) from error
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(there, sent), daemon=True)
    process.start()
    there.close()
    try:
        result = here.recv()
    except EOFError:
        process.join()
        raise CalibrationError(
            f"the process of the probe at batch {batch} died (exit status {process.exitcode}); "
            "-9 is the host's own lack of memory"
        ) from None
    finally:
        here.close()
        if process.is_alive():
            process.join(timeout=10)
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, Probe)
    return result


def _serve(connection: Connection, sent: bytes) -> None:
    """In the other process: run the probe and send what came of it."""
    result: Any
    try:
        work, device, limit, batch, budget, options = pickle.loads(sent)
        meter = find_meter(device, limit)
        result = run_probe(Job(work, meter.device, ()), meter, batch, budget, options)
    except BaseException as error:
        result = error
    try:
        pickle.loads(pickle.dumps(result))
    except Exception as error:  # an exception of the user's that cannot travel
        result = CalibrationError(f"the step raised {type(result).__name__}: {result} ({error})")
    connection.send(result)
    connection.close()
