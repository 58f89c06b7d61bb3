"""Run the jobs: each in a process of its own, one at a time on the GPU, within a given time.

While one job is on the GPU the next ones are predicted, on the CPU, in their own processes, and
wait for the word. A job that crashes or hangs costs itself and nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from .jobs import Job
from .results import Results

Order = dict[str, Any]
Say = Callable[[str], None]

# Seconds that a process may take before it is ready: imports, tracing, answers.
_PREPARING = 180.0
# Seconds beyond its time that a job may take before it is ended: one trial may be under way.
_GRACE = 20.0
# A job gets up to so many times its even share: most need less than it, and what is left over is
# there for the others.
_GENEROUS = 2.5
_LEAST, _MOST = 8.0, 90.0


@dataclass(frozen=True, slots=True)
class Task:
    """One process: a job, and whether it is to be predicted, measured or searched by cuDNN."""

    job: Job
    kind: str


class Worker:
    """A process with its task. What it says arrives in a queue that all workers share."""

    def __init__(
        self, task: Task, command: Sequence[str], inbox: queue.Queue[tuple[Worker, Any]]
    ) -> None:
        self.task = task
        self.ready = self.running = self.finished = False
        self.kill_at = time.monotonic() + _PREPARING
        self._errors: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115, closed in end()
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=_environment(),
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, args=(inbox,), daemon=True)
        self._listener.start()

    def _listen(self, inbox: queue.Queue[tuple[Worker, Any]]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    inbox.put((self, json.loads(line)))
                except ValueError:
                    continue  # cut off in the middle, by the end of the process
        inbox.put((self, None))

    def go(self, seconds: float, have: list[str], kill_at: float) -> None:
        """Give the word."""
        self.running, self.kill_at = True, kill_at
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; the queue will say so
            self._process.stdin.write(json.dumps({"seconds": seconds, "have": have}) + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End the process, whatever it is doing, and wait for that."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._listener.join()  # it reads to the end of the pipe, and closes it
        self._errors.close()

    def last_words(self) -> str:
        """How the process ended: its exit status and the last line that it wrote to stderr."""
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return f"exit status {status}: {lines[-1][:300] if lines else 'no message'}"


def _environment() -> dict[str, str]:
    """The same for every process: no look-ups over the network."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TORCH_SYMBOLIZE_MODE": "fast"}


class Schedule:
    """Takes tasks through their processes and writes down what they say.

    Args:
        results: where to.
        command: the command line for an order.
        seconds: how long all of it may take.
        ahead: how many processes prepare while one is on the GPU.
        say: told of progress.
    """

    def __init__(
        self, results: Results, command: Callable[[Order], Sequence[str]], seconds: float,
        ahead: int, say: Say, snapshots: str | None = None,
    ) -> None:  # fmt: skip
        self._results, self._command, self._say = results, command, say
        self._ends = time.monotonic() + seconds
        self._ahead, self._snapshots = ahead, snapshots
        self._inbox: queue.Queue[tuple[Worker, Any]] = queue.Queue()
        self._workers: list[Worker] = []

    def run(self, tasks: Sequence[Task]) -> None:
        """Take the tasks through, in order, until they or the time end."""
        waiting = [task for task in tasks if self._results.wants(task.job, task.kind)]
        try:
            while (waiting or self._workers) and self._left() > 0:
                while waiting and len(self._workers) <= self._ahead:
                    self._start(waiting.pop(0))
                self._give_the_word(len(waiting))
                self._hear()
                self._end_late_ones()
        finally:
            for worker in self._workers:
                if worker.running:
                    self._blame(worker, "the time ended")
                worker.end()
            self._results.settle(dict.fromkeys(task.job for task in tasks))
            self._results.save()

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _start(self, task: Task) -> None:
        order = {
            "job": task.job.name, "kind": task.kind, "card": self._results.data["machine"],
            "snapshots": self._snapshots,
        }  # fmt: skip
        self._workers.append(Worker(task, self._command(order), self._inbox))

    def _give_the_word(self, waiting: int) -> None:
        """To the first process that is ready, if none is on the GPU."""
        if any(worker.running for worker in self._workers):
            return
        for worker in self._workers:
            if worker.ready:
                share = self._left() / (waiting + len(self._workers))
                seconds = min(max(_GENEROUS * share, _LEAST), _MOST, self._left())
                kill_at = time.monotonic() + seconds + _GRACE
                self._blame(worker, "")
                worker.go(seconds, self._results.known_parts(worker.task.job), kill_at)
                return

    def _hear(self) -> None:
        try:
            worker, message = self._inbox.get(timeout=min(max(self._left(), 0.01), 0.5))
        except queue.Empty:
            return
        if worker not in self._workers:
            return  # it was ended
        job = worker.task.job
        entry = self._results.job(job)
        if message is None:
            if not worker.finished:
                self._blame(worker, worker.last_words())
            self._remove(worker)
        elif "part" in message:
            entry["parts"][message["part"]] = message["found"]
        elif "failed" in message:
            self._blame(worker, message["failed"])
            worker.finished = True
        elif "ready" in message:
            worker.ready, worker.kill_at = True, float("inf")
            entry["cuda_untouched"] = message["cuda_untouched"]
        elif "done" in message:
            worker.finished = True
        else:  # prediction, outside
            entry.update(message)
            worker.finished = worker.task.kind == "predict"
        self._results.save()

    def _end_late_ones(self) -> None:
        for worker in list(self._workers):
            if time.monotonic() > worker.kill_at:
                doing = "measured" if worker.running else "prepared"
                self._blame(worker, f"ended while it was {doing}: too slow")
                self._remove(worker)

    def _remove(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.end()
        task = worker.task
        reason = self._results.job(task.job)["reasons"].get(task.kind, "")
        self._say(f"{task.job.name}, {task.kind}: {reason or 'done'}")

    def _blame(self, worker: Worker, reason: str) -> None:
        """Write down why a task did not come to its end; "" takes that back."""
        self._results.give_reason(worker.task.job, worker.task.kind, reason)
