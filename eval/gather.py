"""What a report shows of a run, read from its tables and stage results. Nothing is drawn or judged here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import duckdb

from eval.benchmarks import how_put
from eval.queries import COMPLETIONS, EVENTS, PUT, SAMPLES, STEPS, SUPERVISED, TOKENS
from eval.summary import Sampled
from pipeline import store
from pipeline.guard import one_line
from pipeline.rundir import RunPaths, read_result, stage_kind
from pipeline.schema import COMPONENT_PREFIX
from pipeline.types import StageResult


@dataclass(frozen=True)
class Evaluation:
    """One checkpoint on one benchmark: (metric, k, slice) to the recorded row of the ``evaluations`` table."""

    checkpoint: str
    benchmark: str
    stage: str
    measures: dict[tuple[str, int | None, str], dict[str, Any]]

    def get(self, metric: str, k: int | None = None, slice_: str = "all") -> dict[str, Any] | None:
        """The recorded row, or None."""
        return self.measures.get((metric, k, slice_))

    def ks(self, metric: str) -> list[int]:
        """The k at which a metric of all problems was recorded, in order."""
        return sorted(k for name, k, part in self.measures if name == metric and part == "all" and k is not None)

    def curve(self, metric: str) -> list[dict[str, Any]]:
        """The rows of a metric over k, all problems."""
        return [self.measures[metric, k, "all"] for k in self.ks(metric)]

    def slices(self) -> list[str]:
        """Names of the parts, "all" left out."""
        return sorted({part for _, _, part in self.measures} - {"all"}, key=natural)


@dataclass
class RunFacts:
    """Everything about one run that a report shows. SQL runs when an attribute is first asked for."""

    paths: RunPaths
    header: dict[str, Any]
    stages: dict[str, StageResult]
    connection: Any = field(repr=False)

    @property
    def run_id(self) -> str:
        return self.paths.run_id

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as it was saved."""
        return self.header["recipe"]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """One row a training step, with ``number`` counted over all rounds from 1, and a mean a reward component."""
        components = "".join(f', avg(w."{name}") AS "{name}"' for name in self.components)
        return [{"number": n, **row} for n, row in enumerate(self.query(STEPS.format(components=components)), 1)]

    @cached_property
    def components(self) -> list[str]:
        """Columns of the reward components, such as reward_format."""
        names = [row["column_name"] for row in self.query("DESCRIBE rewards")]
        return [name for name in names if name.startswith(COMPONENT_PREFIX)]

    @cached_property
    def supervised(self) -> dict[str, list[dict[str, Any]]]:
        """Loss by optimizer step of the supervised stages (the warm start, the regeneration)."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.query(SUPERVISED):
            found.setdefault(row["stage"], []).append(row)
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """Warnings and errors of the run by kind, with how often and the last one's message."""
        return self.query(EVENTS)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """By benchmark, then in the order of the recipe: warm start, rounds, final."""
        found: dict[tuple[str, str, str], dict[tuple[str, int | None, str], dict[str, Any]]] = {}
        for row in self.query("SELECT * FROM evaluations"):
            key = (row["benchmark"], row["checkpoint"], row["stage"])
            found.setdefault(key, {})[row["metric"], row["k"], row["slice"] or "all"] = row
        ordered = sorted(found, key=lambda key: (key[0], checkpoint_order(key[1])))
        return [Evaluation(checkpoint, benchmark, stage, found[benchmark, checkpoint, stage])
                for benchmark, checkpoint, stage in ordered]  # fmt: skip

    @property
    def benchmarks(self) -> list[str]:
        return list(dict.fromkeys(evaluation.benchmark for evaluation in self.evaluations))

    def evaluation(self, checkpoint: str, benchmark: str | None = None) -> Evaluation | None:
        """The evaluation of a checkpoint, on a benchmark or on the first one there is."""
        for candidate in self.evaluations:
            if candidate.checkpoint == checkpoint and benchmark in (None, candidate.benchmark):
                return candidate
        return None

    def before_and_after(self, benchmark: str) -> tuple[Evaluation, Evaluation] | None:
        """The policy before reinforcement learning and after its last evaluated round; None while one is missing."""
        before = self.evaluation("warm-start", benchmark)
        rounds = [e for e in self.evaluations if e.benchmark == benchmark and e.checkpoint.startswith("round-")]
        return (before, rounds[-1]) if before and rounds else None

    def how_put(self, evaluation: Evaluation) -> str:
        """How the problems were put, from the recorded completions."""
        (row,) = self.query(PUT, [evaluation.stage])
        return how_put(**row) if row["problems"] else "its completions are not recorded here"

    def samples(self, evaluation: Evaluation) -> list[Sampled]:
        """The scored completions behind an evaluation."""
        return [Sampled(**row) for row in self.query(SAMPLES, [evaluation.stage])]

    def completions(self, evaluation: Evaluation, problem_id: str) -> list[dict[str, Any]]:
        """The sampled completions of one problem with their text and verdict."""
        return self.query(COMPLETIONS, [evaluation.stage, problem_id])

    @cached_property
    def problems(self) -> dict[str, dict[str, Any]]:
        """Held-out problems by id."""
        rows = self.query("SELECT * FROM problems WHERE split = 'heldout'")
        return {row["problem_id"]: row for row in rows}

    @cached_property
    def cost(self) -> list[dict[str, Any]]:
        """Seconds, completions and tokens by kind of stage, of what this run did itself; its ancestors' is theirs."""
        kinds: dict[str, dict[str, Any]] = {}
        blank = {"stages": 0, "seconds": 0.0, "rollouts": 0, "prompt_tokens": 0, "completion_tokens": 0}
        inherited = set(self.header.get("inherited", ()))
        for key, result in self.stages.items():
            if key not in inherited:
                entry = kinds.setdefault(stage_kind(key), {"kind": stage_kind(key), **blank})
                entry["stages"] += 1
                entry["seconds"] += result.seconds
        for row in self.query(TOKENS, [self.run_id]):
            entry = kinds.setdefault(stage_kind(row["stage"]), {"kind": stage_kind(row["stage"]), **blank})
            for name in ("rollouts", "prompt_tokens", "completion_tokens"):
                entry[name] += row[name]
        return list(kinds.values())

    @property
    def funnel(self) -> list[dict[str, Any]]:
        """The selection's rules in order, with what each left."""
        select = self.stages.get("select")
        return list(select.metrics.get("funnel", ())) if select else []

    @property
    def reward_models(self) -> list[dict[str, Any]]:
        """Measures of the reward models on held-out rollouts: when first trained, then before and after each refresh."""
        rows = []
        for model, first, begin in (("outcome", "reward_model", ""), ("process", "process_model", "process/")):
            for key, result in self.stages.items():
                prefixes = [f"{begin}before/", f"{begin}after/"] if key.endswith("/refresh") else []
                for prefix in ["heldout/"] if key == first else prefixes:
                    values = {k.removeprefix(prefix): v for k, v in result.metrics.items() if k.startswith(prefix)}
                    if values:
                        when = prefix.removeprefix("process/").rstrip("/")
                        rows.append({"model": model, "stage": key, "when": when, **values})
        return rows

    def query(self, sql: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """The rows of a query over this run's tables as dicts; NaN is None. ValueError names a file that is damaged."""
        try:
            cursor = self.connection.execute(sql, list(parameters))
        except (duckdb.IOException, duckdb.InvalidInputException) as error:
            raise ValueError(f"run {self.run_id}: its tables cannot be read: {one_line(error)}") from None
        names = [column[0] for column in cursor.description]
        return [{n: None if v != v else v for n, v in zip(names, row, strict=True)} for row in cursor.fetchall()]


def gather(paths: RunPaths) -> RunFacts:
    """The facts of a run. ValueError when its recipe is missing or unreadable."""
    try:
        header = paths.header
        header["recipe"]["seed"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"run {paths.run_id!r}: {paths.recipe_file} is missing or not a run's recipe ({error}); "
            f"name a run that `grpoflow status` lists"
        ) from None
    return RunFacts(paths, header, stage_results(paths), store.connect(paths.run_id, root=paths.root))


def stage_results(paths: RunPaths) -> dict[str, StageResult]:
    """Complete stages by key in the order in which they finished, inherited ones first."""
    keys = list(paths.header.get("inherited", ()))
    folder = paths.directory / "stages"
    keys += [str(file.parent.relative_to(folder)) for file in folder.rglob("result.json")]
    found = {key: result for key in dict.fromkeys(keys) if (result := read_result(paths, key)) is not None}
    return dict(sorted(found.items(), key=lambda item: item[1].finished_at))


def checkpoint_order(name: str) -> tuple[int, str]:
    """Sort key: base, warm start, rounds by number, final, then anything else by name."""
    fixed = {"base": 0, "warm-start": 1, "final": 3}
    return (fixed.get(name, 2 if name.startswith("round-") else 4), name)


def natural(text: str) -> list[Any]:
    """Sort key that puts level=10 behind level=9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
