"""Worker processes for verdicts that need sympy: one job at a time, killed at the deadline, bounded in memory."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.protocols import Progress, no_progress
from pipeline.types import FinishReason
from rewards.answers import Extraction, canonical, clean, extract
from rewards.verifier import Verdict, decide_extracted

__all__ = ["Verdict", "VerifierPool"]

START_SECONDS = 300.0
"""Longest start of a worker (importing sympy on a loaded machine)."""
CACHED = 1 << 16
"""Verdicts kept by (gold, extracted answer); the oldest used goes first."""

SETTLED = ("correct", "incorrect", "gold_unparsable")
"""Statuses that the same pair of answers would get again."""
Case = tuple[str, str, FinishReason]


class Worker:
    """One process, started by its first job and again after it was killed. ``run`` is for one thread at a time."""

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = self._closed = False
        self._received = b""
        self._running = threading.Lock()

    def run(self, gold: str, answer: str, timeout: float) -> dict[str, Any]:
        """Status and rule of two cleaned answers. The clock starts when the worker has loaded its libraries."""
        with self._running:
            finished = False
            try:
                outcome = self._run(gold, answer, timeout)
                finished = outcome["status"] in SETTLED
            finally:
                if not finished:  # hung, dead, short of memory or interrupted half-way: nothing of it is trusted again
                    self._end()
            if not finished and not self._closed:
                self._start()  # its libraries load while the caller goes on
            return outcome

    def _run(self, gold: str, answer: str, timeout: float) -> dict[str, Any]:
        if self._closed:
            raise RuntimeError("the verifier pool is closed: open a new one")
        process = self._process or self._start()
        if not self._ready:
            if self._line(process, START_SECONDS) is None:
                raise RuntimeError(
                    f"a verifier process did not start in {START_SECONDS:g} s or ended (status {process.poll()}): is "
                    f"math-verify installed, and is rewards.memory_mb = {self._memory_mb} enough?"
                )
            self._ready = True
        job = {"gold": gold, "answer": answer, "seconds": timeout}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return {"status": "error", "rule": "the worker process had ended"}
        line = self._line(process, timeout)
        if line is not None:
            return json.loads(line)
        if process.poll() is None:
            return {"status": "timeout", "rule": f"no verdict in {timeout:g} s"}
        return {"status": "error", "rule": f"the worker process ended with status {process.returncode}"}

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._ready, self._received = False, b""
        # -P: a file of the caller's folder must not stand in for a library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rewards.worker_process", str(self._memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        return self._process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """The next line, None at the deadline or the end of the process."""
        assert process.stdout is not None
        deadline, descriptor = time.monotonic() + seconds, process.stdout.fileno()
        poll = select.poll()  # select.select cannot watch descriptors over 1023
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                process.wait()
                return None
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def close(self) -> None:
        """Kill the process, for good; a job that runs in another thread ends with an error. May be called twice."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._running:
            self._end()


class VerifierPool:
    """Verdicts from any thread. Use as a context manager; no process is started before a verdict needs one."""

    def __init__(self, workers: int = 1, timeout: float = 5.0, memory_mb: int = 2048) -> None:
        if workers < 1 or timeout <= 0:
            raise ValueError(f"expected at least one worker and a timeout over 0 s, got {workers} and {timeout:g}")
        self.workers, self.timeout, self.memory_mb = workers, timeout, memory_mb
        self._reset()

    def _reset(self) -> None:
        self._process_id = os.getpid()
        self._all = [Worker(self.memory_mb) for _ in range(self.workers)]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._all:
            self._idle.put(worker)
        self._cache: OrderedDict[tuple[str, str | None], Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process. May be called twice."""
        if os.getpid() == self._process_id:
            for worker in self._all:
                worker.close()

    def judge(self, gold: str, completion: str, finish_reason: FinishReason = "stop") -> Verdict:
        """One verdict, after at most ``timeout`` seconds of a worker (and its start, where it is the first)."""
        started = time.perf_counter()
        verdict = self._judge(gold, extract(completion, finish_reason))
        return replace(verdict, seconds=time.perf_counter() - started)

    def judge_many(self, cases: Sequence[Case], progress: Progress = no_progress) -> list[Verdict]:
        """One verdict a case, in order. Equal pairs of gold and answer are judged once, over all workers."""
        verdicts: list[Verdict | None] = []
        pending: dict[tuple[str, str | None], list[int]] = {}
        for index, (gold, completion, finish_reason) in enumerate(cases):
            started = time.perf_counter()
            extraction = extract(completion, finish_reason)
            verdict = self._known(gold, extraction)
            verdicts.append(verdict and replace(verdict, seconds=time.perf_counter() - started))
            if verdict is None:
                pending.setdefault((gold, extraction.answer), []).append(index)
        done = len(cases) - sum(map(len, pending.values()))
        progress(done, len(cases), "verifier")
        if pending:
            with ThreadPoolExecutor(self.workers, "verifier") as threads:
                jobs = threads.map(lambda indices: self.judge(*cases[indices[0]]), pending.values())
                for indices, verdict in zip(pending.values(), jobs, strict=True):
                    for index in indices:
                        verdicts[index] = verdict
                    done += len(indices)
                    progress(done, len(cases), "verifier")
        return [verdict for verdict in verdicts if verdict is not None]

    def _known(self, gold: str, extraction: Extraction) -> Verdict | None:
        """The verdict from the cache or of this process."""
        if os.getpid() != self._process_id:
            self._reset()  # this is a fork: the workers and their pipes are the parent's
        key = (gold, extraction.answer)
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
        verdict = decide_extracted(gold, extraction)
        if verdict is not None:
            self._remember(key, verdict)
        return verdict

    def _remember(self, key: tuple[str, str | None], verdict: Verdict) -> None:
        if key[1] is None or verdict.status not in SETTLED:
            return
        with self._lock:
            self._cache[key] = verdict
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)

    def _judge(self, gold: str, extraction: Extraction) -> Verdict:
        known = self._known(gold, extraction)
        if known is not None:
            return known
        extracted = extraction.answer
        assert extracted is not None  # without an answer the verdict is known
        worker = self._idle.get()
        try:
            outcome = worker.run(clean(gold), clean(extracted), self.timeout)
        finally:
            self._idle.put(worker)
        verdict = Verdict(outcome["status"], canonical(extracted), outcome["rule"], extracted=extracted)
        self._remember((gold, extracted), verdict)
        return verdict
