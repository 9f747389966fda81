"""How one call of the vLLM sampler is shared out: groups to engines by load, a dead engine's requests to the others."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from pipeline.backends.vllm_child import ChildEngine
from pipeline.backends.vllm_remote import RemoteEngine
from pipeline.protocols import EngineDied, Progress
from pipeline.types import Completion

logger = logging.getLogger(__name__)

LOOK = 0.2
"""Seconds between two calls of ``progress`` at most: how soon a cancellation is seen."""
Engine = ChildEngine | RemoteEngine
Request = tuple[str, list[int], int]
"""Key, prompt and seed of one completion."""


@dataclass
class Call:
    """One call of ``sample``: groups are handed to the engine with the fewest requests, as long as it has room.

    ``open`` holds what each engine was given and has not answered: an engine that dies leaves it to the others.
    """

    engines: list[Engine]
    parameters: dict[str, Any]
    number: int
    window: int
    open: dict[str, dict[str, Request]] = field(default_factory=dict)

    def run(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], progress: Progress
    ) -> list[list[Completion]]:
        """Hand out, collect, report, until every completion is there."""
        out: list[list[Completion | None]] = [[None] * len(group) for group in seeds]
        total, done, tokens, started = sum(len(group) for group in seeds), 0, 0, time.monotonic()
        # Keys differ from call to call: what an earlier, cancelled call left behind is never taken for this one's.
        waiting = deque(
            [(f"{self.number}-{p}-{g}", list(prompt), seed) for g, seed in enumerate(group)]
            for p, (prompt, group) in enumerate(zip(prompts, seeds, strict=True))
            if group
        )
        self.open = {engine.name: {} for engine in self.engines}
        while done < total:
            self._hand_out(waiting)
            for engine in list(self.engines):
                try:
                    finished = self._collect(engine)
                except EngineDied as death:
                    self._leave(engine, waiting, death)
                    continue
                for key, ids, logprobs, reason, seconds in finished:
                    del self.open[engine.name][key]
                    _, p, g = key.split("-")
                    out[int(p)][int(g)] = Completion(tuple(ids), tuple(logprobs), reason, seconds)
                    done, tokens = done + 1, tokens + len(ids)
            progress(done, total, f"{tokens / (time.monotonic() - started):,.0f} tok/s")
            if done < total:
                wait([engine.connection for engine in self.engines], LOOK)
        return [[completion for completion in group if completion is not None] for group in out]

    def _hand_out(self, waiting: deque[list[Request]]) -> None:
        while waiting:
            engine = min(self.engines, key=lambda e: len(self.open[e.name]))
            if len(self.open[engine.name]) >= self.window:
                return
            requests = waiting.popleft()
            self.open[engine.name].update({request[0]: request for request in requests})
            try:
                engine.send(("add", requests, self.parameters))
            except EngineDied as death:
                self._leave(engine, waiting, death)

    def _collect(self, engine: Engine) -> list[Any]:
        """What the engine has finished by now."""
        if not engine.connection.poll():
            engine.check_alive()
            return []
        kind, content = engine.receive()
        if kind == "refused":
            raise ValueError(f"{engine.name} refused a request: {content}")
        return content

    def _leave(self, engine: Engine, waiting: deque[list[Request]], death: EngineDied) -> None:
        """Give a dead engine's requests to the others; raise its death when there are none."""
        self.engines.remove(engine)
        if not self.engines:
            raise death
        logger.warning("%s; its %d requests move on", death, len(self.open[engine.name]))
        waiting.appendleft(list(self.open.pop(engine.name).values()))

    def cancel(self) -> None:
        """Drop what runs, and read until every engine has said so."""
        for engine in self.engines:
            try:
                engine.send(("cancel",))
                while engine.receive()[0] != "cancelled":
                    pass
            except EngineDied:
                continue  # the next call tells
