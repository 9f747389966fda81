"""The child of ``rewards.workers``: compares one pair of answers a line, under its own limits, until its parent is gone.

Run as ``python -m rewards.worker_process MEMORY_MB``. Lines are JSON both ways; nothing of them is ever evaluated.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
from typing import Any


def answer_line(line: bytes) -> dict[str, Any]:
    """The outcome of one job: status and the rule that decided."""
    from rewards import symbolic
    from rewards.comparison import GoldUnparsable, compare

    job = json.loads(line)
    try:
        correct, rule = compare(job["gold"], job["answer"], symbolic.equal)
    except GoldUnparsable:
        return {"status": "gold_unparsable", "rule": "math-verify reads nothing from the gold"}
    except MemoryError:
        return {"status": "error", "rule": "out of memory"}
    except BaseException as error:  # math-verify's own time-out is no Exception; whatever it is, the parent must hear
        return {"status": "error", "rule": f"{type(error).__name__}: {error}"[:300]}
    return {"status": "correct" if correct else "incorrect", "rule": rule}


def limit_memory(memory_mb: int) -> None:
    """From now on this process gets a MemoryError for address space over the limit; it leaves no core dump."""
    limit = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(memory_mb: int) -> None:
    """Answer until the parent closes the pipe or is gone; a job that outlives its limit ends the process."""
    limit_memory(memory_mb)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the parent does with it is inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it closes the pipe
    # Frames travel over a duplicate: what a library prints cannot break them.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.setrecursionlimit(3000)
    # math-verify warns once a process that it has no time-out; the time-out is the parent's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from rewards import symbolic  # noqa: F401  # loaded before the parent starts its clock

    parent = os.getppid()
    answers.write(b'{"ready": true}\n')
    answers.flush()
    buffer = b""
    while True:
        while b"\n" not in buffer:
            # A fork of the parent may hold the pipe open for ever, so the end of the pipe alone is no sign.
            while not select.select([0], [], [], 1.0)[0]:
                if os.getppid() != parent:
                    return
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            buffer += chunk
        line, _, buffer = buffer.partition(b"\n")
        # The kernel ends the process at this alarm even inside one long operation, and even when the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, json.loads(line)["seconds"] + 1.0)
        outcome = answer_line(line)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(json.dumps(outcome).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
