"""The terminal: a progress bar for the stage at work, one readable line a step, a table at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pipeline.events import Event
from pipeline.rundir import RunPaths
from pipeline.types import StageResult

STEP_STAGE = re.compile(r"round-\d+/step-\d+/(rollout|reward|update)")


class Display:
    """Writes to the terminal; without one (a log file, Prefect) the bars stay away and the lines remain."""

    def __init__(
        self,
        stages: int,
        console: Console | None = None,
        *,
        quiet: bool = False,
        also: Callable[[str], None] | None = None,
    ) -> None:
        self._also = also  # who else is told each line: the log of the Prefect page
        self.console = console or Console(highlight=False, quiet=quiet, soft_wrap=True)
        self._bars = Progress(
            # Fits 80 columns: none of these may be squeezed into dots.
            TextColumn("{task.description:<26}"), BarColumn(bar_width=8), MofNCompleteColumn(),
            TimeRemainingColumn(compact=True), TextColumn("left {task.fields[note]}"),
            console=self.console, transient=True, refresh_per_second=4,
            disable=quiet or not self.console.is_terminal,
        )  # fmt: skip
        self._whole = self._bars.add_task("stages", total=stages, note="")
        self._stage: Any = None
        self._reused = 0
        self._header_due = True
        self._warned: set[tuple[str, str]] = set()

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, key: str) -> None:
        if self._reused:
            self.line(f"{self._reused} stages were complete and are reused; going on with {key}")
            self._reused = 0
        if self._stage is not None:
            self._bars.remove_task(self._stage)
        self._stage = self._bars.add_task(key, total=None, note="")

    def end(self, key: str, result: StageResult, *, reused: bool) -> None:
        self._bars.advance(self._whole)
        if reused:
            self._reused += 1
        elif not STEP_STAGE.fullmatch(key):
            self.line(f"{key:<22} {result.seconds:7.1f} s  {headline(result.metrics)}")
            self._header_due = True

    def progress(self, key: str, done: int, total: int, note: str) -> None:
        if self._stage is not None:
            self._bars.update(self._stage, completed=done, total=total, note=note)

    def step(self, row: dict[str, Any]) -> None:
        if self._reused:
            return
        if self._header_due:
            self.line("round step      reward  correct       KL  entropy  length   tok/s  seconds")
            self._header_due = False
        where = f"{row['round']:>5} {row['step']:>3}/{row['steps']:<4}"
        numbers = f"{_number(row['reward'], 8, 3)} {_number(row['correct'], 8, 3)} {_number(row['kl'], 8, 4)}"
        rest = f"{_number(row['entropy'], 8, 3)} {_number(row['length'], 7, 1)} {row['tokens_per_second']:7,.0f}"
        self.line(f"{where}{numbers} {rest} {row['seconds']:8.1f}")

    def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
        """The table comes at the end; the stage's own line has the headline."""

    def event(self, key: str, event: Event) -> None:
        """A warning, the first of its kind in a round; the store has them all, and a stop is said where the run ends."""
        place = (event.kind, key.partition("/")[0])
        if event.severity == "warning" and place not in self._warned:
            self._warned.add(place)
            self.console.print(f"warning  {key}: {event.message}", markup=False)  # the Prefect page is told by itself

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)
        if self._also is not None:
            self._also(text)


class Throttle:
    """True at most once an interval."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._last = seconds, float("-inf")

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._last < self.seconds:
            return False
        self._last = now
        return True


def headline(metrics: dict[str, Any] | Any) -> str:
    """The few numbers of a stage that people look for."""
    parts = []
    for name in (
        "kept",
        "train",
        "heldout",
        "loss",
        "correct",
        "pass@1",
        "greedy",
        "before/auc",
        "after/auc",
        "heldout/auc",
    ):
        value = metrics.get(name)
        if isinstance(value, list | tuple):
            parts.append(f"{name} {_interval(value)}")
        elif isinstance(value, float):
            parts.append(f"{name} {value:.3f}")
        elif value is not None:
            parts.append(f"{name} {value}")
    return "  ".join(parts)


def evaluation_table(evaluations: dict[str, Any], ks: tuple[int, ...]) -> Table:
    """Checkpoints by greedy, pass@k and maj@k, in percent with 95 % intervals."""
    columns = ["greedy", *(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in ks if k > 1)]
    table = Table(title="Held-out problems, % with 95 % intervals", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("checkpoint", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")  # in a narrow terminal the interval goes below its value
    for name, metrics in evaluations.items():
        table.add_row(name, *(_interval(metrics[c]) if metrics.get(c) else "-" for c in columns))
    return table


def closing(paths: RunPaths, report: Any) -> list[str]:
    """Where the results are, and two questions to ask of them."""
    return [
        f"run      {paths.directory}",
        f"report   {report}",
        "ask      grpoflow sql --run "
        + paths.run_id
        + ' "SELECT round, step, avg(correct), avg(len(completion_token_ids))'
        " FROM rollouts JOIN rewards USING (rollout_id) WHERE purpose = 'train' GROUP BY ALL ORDER BY ALL\"",
        "         grpoflow sql --run " + paths.run_id + ' "SELECT subject, level, avg(correct) FROM rollouts'
        ' JOIN rewards USING (rollout_id) JOIN problems USING (problem_id) GROUP BY ALL ORDER BY 3"',
    ]


def _interval(value: Any) -> str:
    mean, low, high = value
    return f"{100 * mean:.1f} [{100 * low:.0f}–{100 * high:.0f}]"


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{value:{width}.{digits}f}" if value is not None else "-".rjust(width)
