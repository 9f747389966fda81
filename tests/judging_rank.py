"""A rank for the tests of the verifier: its workers are children of a child of the elastic launcher."""

from __future__ import annotations

import os

from pipeline.backends.rank_group import serve
from rewards.workers import VerifierPool


class Worker:
    def judge(self, gold: str, completion: str) -> tuple[str, list[int]]:
        with VerifierPool(1, timeout=60.0) as pool:
            verdict = pool.judge(gold, completion, "stop")
            return verdict.status, [worker._process.pid for worker in pool._all if worker._process is not None]


if __name__ == "__main__":
    serve(int(os.environ["RANK"]), Worker())
