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

START_SECONDS = 120.0
"""Longest start of a worker (importing sympy on a loaded machine)."""
CACHED = 1 << 16
"""Verdicts kept by (gold, extracted answer); the oldest used goes first."""

Case = tuple[str, str, FinishReason]


class Worker:
    """One process. It is started by the first job and again after it was killed; ``run`` is for one thread at a time."""

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._received = b""

    def run(self, gold: str, answer: str, timeout: float) -> dict[str, Any]:
        """Status and rule of two cleaned answers. The clock starts when the worker has loaded its libraries."""
        finished = False
        try:
            outcome = self._run(gold, answer, timeout)
            finished = outcome["status"] in ("correct", "incorrect", "gold_unparsable")
            return outcome
        finally:
            if not finished:  # hung, dead, short of memory, or interrupted half-way: nothing of it is trusted again
                self.close()

    def _run(self, gold: str, answer: str, timeout: float) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        if not self._ready:
            if self._line(START_SECONDS) is None:
                raise RuntimeError(
                    f"a verifier process did not start in {START_SECONDS:g} s or ended with status "
                    f"{self._process.poll()}: is math-verify installed, is rewards.memory_mb = {self._memory_mb} enough?"
                )
            self._ready = True
        job = {"gold": gold, "answer": answer, "seconds": timeout}
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"status": "error", "rule": "the worker process had ended"}
        line = self._line(timeout)
        if line is not None:
            return json.loads(line)
        if self._process.poll() is None:
            return {"status": "timeout", "rule": f"no verdict in {timeout:g} s"}
        return {"status": "error", "rule": f"the worker process ended with status {self._process.returncode}"}

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rewards.worker_process", str(self._memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self._ready, self._received = False, b""

    def _line(self, seconds: float) -> bytes | None:
        """The next line, None at the deadline or the end of the process."""
        assert self._process is not None and self._process.stdout is not None
        deadline, descriptor = time.monotonic() + seconds, self._process.stdout.fileno()
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                self._process.wait()
                return None
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """Kill the process. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class VerifierPool:
    """Verdicts from any thread. Use as a context manager; no process is started before a verdict needs one."""

    def __init__(self, workers: int = 1, timeout: float = 5.0, memory_mb: int = 2048) -> None:
        self.workers, self.timeout, self.memory_mb = workers, timeout, memory_mb
        self._all = [Worker(memory_mb) for _ in range(workers)]
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
        for worker in self._all:
            worker.close()

    def judge(self, gold: str, completion: str, finish_reason: FinishReason = "stop") -> Verdict:
        """One verdict, within ``timeout`` seconds of a worker's time."""
        started = time.perf_counter()
        verdict = self._judge(gold, extract(completion, finish_reason))
        return replace(verdict, seconds=time.perf_counter() - started)

    def judge_many(self, cases: Sequence[Case], progress: Progress = no_progress) -> list[Verdict]:
        """One verdict a case, in order; what needs a worker is spread over all of them."""
        verdicts: list[Verdict | None] = []
        for gold, completion, finish_reason in cases:
            started = time.perf_counter()
            verdict = self._known(gold, extract(completion, finish_reason))
            seconds = time.perf_counter() - started
            verdicts.append(replace(verdict, seconds=seconds) if verdict else None)
        left = [index for index, verdict in enumerate(verdicts) if verdict is None]
        done = len(cases) - len(left)
        if left:
            with ThreadPoolExecutor(self.workers, "verifier") as threads:
                jobs = threads.map(lambda index: self.judge(*cases[index]), left)
                for index, verdict in zip(left, jobs, strict=True):
                    verdicts[index] = verdict
                    done += 1
                    progress(done, len(cases), "verifier")
        return [verdict for verdict in verdicts if verdict is not None]

    def _known(self, gold: str, extraction: Extraction) -> Verdict | None:
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
        if verdict.extracted is None or verdict.status not in ("correct", "incorrect"):
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
