"""Worker processes: they end with their work or are killed, whoever asks, and nothing of them is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.backends.rank_group import RankGroup
from rewards.workers import Case, VerifierPool

HANGS = r"\boxed{\exp(\exp(\exp(\exp(100))))}"
"""Passes every limit of form, and keeps sympy busy for ever."""
SLOW_GOLD = r"\pi"
NEEDS_SYMPY: Case = (r"(x+1)^2", r"\boxed{x^2+2x+1}", "stop")


def worker_ids(pool: VerifierPool) -> list[int]:
    return [worker._process.pid for worker in pool._all if worker._process is not None]


def alive(process_id: int) -> bool:
    """Is there such a process that is not a zombie?"""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(process_id: int, seconds: float = 90.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(process_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(process_id)


def test_no_process_starts_before_one_is_needed() -> None:
    with VerifierPool(2) as pool:
        assert pool.judge("5", r"\boxed{5}").status == "correct"
        assert worker_ids(pool) == []


def test_a_hanging_job_is_killed_and_the_next_one_judged() -> None:
    with VerifierPool(1, timeout=1.0) as pool:
        hung = pool.judge(SLOW_GOLD, HANGS)
        assert (hung.status, hung.rule) == ("timeout", "no verdict in 1 s")
        assert hung.answer == r"\exp(\exp(\exp(\exp(100))))"
        pool.timeout = 60.0  # a busy machine may need more than a second for what takes milliseconds
        assert pool.judge(*NEEDS_SYMPY).status == "correct"


def test_equal_pairs_are_judged_once_in_a_call() -> None:
    with VerifierPool(1, timeout=1.0) as pool:
        started = 0
        original = pool._all[0].run

        def counted(gold: str, answer: str, timeout: float) -> dict[str, str]:
            nonlocal started
            started += 1
            return original(gold, answer, timeout)

        pool._all[0].run = counted  # type: ignore[method-assign]
        hangs: Case = (SLOW_GOLD, HANGS, "stop")
        assert [v.status for v in pool.judge_many([hangs] * 3)] == ["timeout"] * 3
        assert started == 1
        pool.judge_many([hangs])  # a time-out says nothing for ever: tried again
        assert started == 2
        pool.timeout = 60.0
        assert [v.status for v in pool.judge_many([NEEDS_SYMPY] * 3 + [("5", r"\boxed{5}", "stop")])] == ["correct"] * 4
        assert started == 3
        pool.judge(*NEEDS_SYMPY)  # cached
        assert started == 3


def test_a_worker_has_the_memory_limit_of_its_pool() -> None:
    with VerifierPool(1, timeout=60, memory_mb=512) as pool:
        pool.judge(*NEEDS_SYMPY)
        limits = Path(f"/proc/{worker_ids(pool)[0]}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max address space"))
    assert line.split()[3] == str(512 << 20)


def test_running_out_of_memory_is_an_error_of_that_job() -> None:
    program = (
        "import json; from rewards import symbolic, worker_process\n"
        "worker_process.limit_memory(512)\n"
        "symbolic.equal = lambda gold, answer: len(bytearray(1 << 30)) > 0\n"
        "print(worker_process.answer_line(json.dumps({'gold': 'x', 'answer': 'y'}))['rule'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "out of memory"


def test_a_worker_that_dies_is_an_error_and_is_replaced() -> None:
    with VerifierPool(1, timeout=60) as pool:
        pool.judge(*NEEDS_SYMPY)
        os.kill(worker_ids(pool)[0], signal.SIGKILL)
        assert pool.judge(r"(x+2)^2", r"\boxed{x^2+4x+4}").status == "error"
        assert pool.judge(r"(x+2)^2", r"\boxed{x^2+4x+4}").status == "correct"


def test_progress_reaches_the_number_of_cases() -> None:
    seen: list[tuple[int, int]] = []
    cases: list[Case] = [("5", r"\boxed{5}", "stop"), NEEDS_SYMPY, NEEDS_SYMPY, ("5", "", "stop")]
    with VerifierPool(1, timeout=60) as pool:
        verdicts = pool.judge_many(cases, progress=lambda done, total, note: seen.append((done, total)))
    assert [v.status for v in verdicts] == ["correct", "correct", "correct", "no_answer"]
    assert seen == [(2, 4), (4, 4)]


def test_threads_and_asyncio_share_a_pool() -> None:
    cases = [(rf"(x+{n})^2", rf"\boxed{{x^2+{2 * n}x+{n * n}}}") for n in range(1, 9)]
    with VerifierPool(2, timeout=60) as pool:

        async def ask() -> list[str]:
            verdicts = await asyncio.gather(*(asyncio.to_thread(pool.judge, *case) for case in cases))
            return [v.status for v in verdicts]

        assert asyncio.run(ask()) == ["correct"] * 8
        results: list[str] = []
        threads = [threading.Thread(target=lambda c=c: results.append(pool.judge(*c).status)) for c in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == ["correct"] * 8
        assert len(worker_ids(pool)) <= 2


def test_closing_leaves_no_process_and_a_closed_pool_says_so() -> None:
    pool = VerifierPool(2, timeout=60)
    pool.judge_many([NEEDS_SYMPY, (r"(x+2)^2", r"\boxed{x^2+4x+4}", "stop")])
    ids = worker_ids(pool)
    assert ids
    pool.close()
    pool.close()
    assert all(gone(process_id) for process_id in ids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.judge(r"(x+3)^2", r"\boxed{x^2+6x+9}")


def test_closing_ends_a_job_that_runs_in_another_thread() -> None:
    pool = VerifierPool(1, timeout=60)
    pool.judge(*NEEDS_SYMPY)
    statuses: list[str] = []
    thread = threading.Thread(target=lambda: statuses.append(pool.judge(SLOW_GOLD, HANGS).status))
    thread.start()
    while not pool._idle.empty():
        time.sleep(0.01)
    time.sleep(0.2)
    pool.close()
    thread.join(30)
    assert statuses == ["error"]
    assert worker_ids(pool) == []


PARENT = """
import os, sys, threading
from pipeline.backends.rank_group import RankGroup
from rewards.workers import Case, VerifierPool
pool = VerifierPool(1, timeout=1.0)
pool.judge('(x+1)^2', r'\\boxed{x^2+2x+1}')
print(pool._all[0]._process.pid, flush=True)
if sys.argv[1] == 'busy':
    threading.Thread(target=pool.judge, args=(r'\\pi', r'\\boxed{\\exp(\\exp(\\exp(\\exp(100))))}'), daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_workers_end_when_their_parent_is_killed(state: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert alive(worker)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    assert gone(worker)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_of_the_parent_uses_workers_of_its_own() -> None:
    with VerifierPool(1, timeout=60) as pool:
        pool.judge(*NEEDS_SYMPY)
        mine = worker_ids(pool)
        child = os.fork()
        if child == 0:
            with pool:
                status = pool.judge(r"(x+2)^2", r"\boxed{x^2+4x+4}").status
                others = worker_ids(pool)
            os._exit(0 if status == "correct" and not set(others) & set(mine) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert worker_ids(pool) == mine
        assert pool.judge(r"(x+3)^2", r"\boxed{x^2+6x+9}").status == "correct"


def test_the_ranks_of_a_learner_judge_with_workers_of_their_own(tmp_path: Path) -> None:
    group = RankGroup("tests.judging_rank", 2, tmp_path, {"OMP_NUM_THREADS": "1"})
    right, wrong = group.call("judge", [NEEDS_SYMPY[:2], (NEEDS_SYMPY[0], r"\boxed{x^2+2x+2}")])
    group.close()
    assert (right[0], wrong[0]) == ("correct", "incorrect")
    assert set(right[1]).isdisjoint(wrong[1])
    assert all(gone(process_id) for process_id in [*right[1], *wrong[1]])


@pytest.mark.parametrize(("workers", "timeout"), [(0, 5.0), (1, 0.0)])
def test_a_pool_without_workers_or_time_is_refused(workers: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        VerifierPool(workers, timeout)
