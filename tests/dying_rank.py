"""A rank for the tests of ``RankGroup``: it answers, raises or dies when told to."""

from __future__ import annotations

import os
import time

from pipeline.backends.rank_group import serve


class Worker:
    def echo(self, value: int) -> int:
        return value

    def fail(self, key: str) -> None:
        if key == "second":
            raise KeyError(key)
        time.sleep(60)  # as a rank does that waits for the failed one

    def die(self, status: int) -> None:
        if status:
            print("last words", flush=True)
            os._exit(status)
        time.sleep(60)


if __name__ == "__main__":
    serve(int(os.environ["RANK"]), Worker())
