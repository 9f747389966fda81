"""Sequences to micro-batches under a token budget, and micro-batches to the index arrays a model runs on. Pure numpy.

Three layouts with one result: "shared" computes a prompt once for all its completions, "packed" once for each of them
(both lay tokens end to end, without pads), "padded" is a rectangle of rows for models with their own attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.types import TrainSequence

Layout = Literal["shared", "packed", "padded"]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who attends to whom among C tokens laid end to end, as rectangles of positions into them (pads point at 0).

    ``causal_rows`` [U, L]: runs that start from nothing (a prompt, or a prompt with its only completion); each token
    sees those before it in its row. ``branch_rows`` [S, K]: completions of a shared prompt; each token sees the prompt,
    the first ``prompt_lengths`` [S] tokens of causal row ``branch_prompts`` [S], and those before it in its own row.
    ``output_index`` [C]: where each token stands in the two rectangles' outputs, flattened one after the other.
    """

    causal_rows: np.ndarray
    branch_rows: np.ndarray
    branch_prompts: np.ndarray
    prompt_lengths: np.ndarray
    output_index: np.ndarray


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A micro-batch. R rows of C model inputs; N completion tokens of B sequences, in ``members`` order.

    ``input_ids``, ``position_ids`` int64 [R, C]; ``predictors`` [N]: flat input position whose output predicts token n;
    ``targets`` [N]; ``sequence`` [N]: which of the B sequences; ``lengths`` [B]; ``members`` [B]: their indices in the
    step. ``plan`` for R = 1 without pads, else ``attention_mask`` bool [R, C].

    Example, prompt (7, 8) shared by completions (1, 2) and (3): inputs 7 8 1, positions 0 1 2 (the last token of a
    completion predicts nothing, so it is not run), predictors 1 2 1, targets 1 2 3, sequence 0 0 1, lengths 2 1.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    predictors: np.ndarray
    targets: np.ndarray
    sequence: np.ndarray
    lengths: np.ndarray
    members: np.ndarray
    plan: AttentionPlan | None = None
    attention_mask: np.ndarray | None = None


def micro_batches(
    sequences: Sequence[TrainSequence], members: Sequence[int], budget: int, *, layout: Layout, by_group: bool = False
) -> list[list[int]]:
    """Lists of indices into ``sequences``, each at most ``budget`` input tokens (a longer single one stands alone).

    Sorted by length, longest first. Under "shared", completions of one prompt stay together as far as the budget goes;
    ``by_group`` never parts a group, whatever its size (DPO's pairs). The result of a step does not depend on this.
    """
    units = _units(sequences, members, layout=layout, by_group=by_group)
    pieces = [piece for unit in units for piece in ([unit] if by_group else _split(sequences, unit, budget, layout))]
    pieces.sort(key=lambda piece: (-_longest(sequences, piece), piece[0]))
    batches: list[list[int]] = []
    current: list[int] = []
    for piece in pieces:
        if current and cost(sequences, current + piece, layout) > budget:
            batches.append(current)
            current = []
        current = current + piece
    return [*batches, current] if current else batches


def cost(sequences: Sequence[TrainSequence], members: Sequence[int], layout: Layout) -> int:
    """Input tokens of a micro-batch, pads included; the last token of a completion is not run."""
    runs = [max(0, len(sequences[i].completion_token_ids) - 1) for i in members]
    prompts = [len(sequences[i].prompt_token_ids) for i in members]
    if layout == "padded":
        return len(members) * max(p + r for p, r in zip(prompts, runs, strict=True))
    if layout == "packed":
        return sum(runs) + sum(prompts)
    return sum(runs) + sum(map(len, {tuple(sequences[i].prompt_token_ids) for i in members}))


def pack(sequences: Sequence[TrainSequence], members: Sequence[int], *, layout: Layout) -> TokenBatch:
    """The ``TokenBatch`` of these members. ValueError for an empty prompt: nothing would predict the first token."""
    for i in members:
        if not len(sequences[i].prompt_token_ids):
            raise ValueError(
                f"sequence {sequences[i].sequence_id!r} has an empty prompt: at least a BOS token is needed"
            )
    chosen = [sequences[i] for i in members]
    return _pad_rows(chosen, members) if layout == "padded" else _lay_out(chosen, members, share=layout == "shared")


def preference_pairs(sequences: Sequence[TrainSequence], members: Sequence[int]) -> np.ndarray:
    """int64 [K, 2]: (chosen, rejected) as positions in ``members``: k-th advantage > 0 with k-th < 0 of each group."""
    sides: dict[str, tuple[list[int], list[int]]] = {}
    for position, i in enumerate(members):
        advantages = sequences[i].advantages
        if advantages is None or not len(advantages) or advantages[0] == 0:
            continue
        sides.setdefault(sequences[i].group_id, ([], []))[int(advantages[0] < 0)].append(position)
    pairs = []
    for group_id, (chosen, rejected) in sides.items():
        if len(chosen) != len(rejected):
            raise ValueError(
                f"group {group_id!r}: {len(chosen)} chosen and {len(rejected)} rejected completions: DPO needs as many "
                f"advantages of +1 as of -1 in a group (pipeline.advantages.preference_signs makes them so)"
            )
        pairs += list(zip(chosen, rejected, strict=True))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _units(
    sequences: Sequence[TrainSequence], members: Sequence[int], *, layout: Layout, by_group: bool
) -> list[list[int]]:
    units: dict[object, list[int]] = {}
    for i in members:
        # A prompt's hidden states depend on its ids alone, so equal ids may share them whatever their group.
        shared = tuple(sequences[i].prompt_token_ids) if layout == "shared" else i
        units.setdefault(sequences[i].group_id if by_group else shared, []).append(i)
    return list(units.values())


def _split(sequences: Sequence[TrainSequence], unit: list[int], budget: int, layout: Layout) -> list[list[int]]:
    unit = sorted(unit, key=lambda i: (-len(sequences[i].completion_token_ids), i))
    pieces: list[list[int]] = [[]]
    for i in unit:
        if pieces[-1] and cost(sequences, [*pieces[-1], i], layout) > budget:
            pieces.append([])
        pieces[-1].append(i)
    return pieces


def _longest(sequences: Sequence[TrainSequence], piece: list[int]) -> int:
    return max(len(sequences[i].prompt_token_ids) + len(sequences[i].completion_token_ids) for i in piece)


def _lay_out(chosen: Sequence[TrainSequence], members: Sequence[int], *, share: bool) -> TokenBatch:
    prompts: dict[object, list[int]] = {}
    for b, sequence in enumerate(chosen):
        prompts.setdefault(tuple(sequence.prompt_token_ids) if share else b, []).append(b)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    causal: list[np.ndarray] = []
    branches: list[tuple[np.ndarray, int, int]] = []
    predictors: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(chosen)
    total = 0
    for group in prompts.values():
        prompt = np.asarray(chosen[group[0]].prompt_token_ids, dtype=np.int64)
        start, size = total, len(prompt)
        ids.append(prompt)
        positions.append(np.arange(size))
        total += size
        causal.append(np.arange(start, total))
        for b in group:
            completion = np.asarray(chosen[b].completion_token_ids, dtype=np.int64)
            run = np.arange(total, total + max(0, len(completion) - 1))
            if len(completion):
                predictors[b] = np.concatenate([[start + size - 1], run])
            if not run.size:
                continue
            ids.append(completion[:-1])
            positions.append(size + np.arange(run.size))
            total += run.size
            if len(group) == 1:
                causal[-1] = np.concatenate([causal[-1], run])
            else:
                branches.append((run, len(causal) - 1, size))
    return TokenBatch(
        input_ids=np.concatenate(ids)[None],
        position_ids=np.concatenate(positions)[None],
        predictors=np.concatenate(predictors),
        members=np.asarray(members, dtype=np.int64),
        plan=_plan(causal, branches, total),
        **_completion_arrays(chosen),
    )


def _plan(causal: list[np.ndarray], branches: list[tuple[np.ndarray, int, int]], total: int) -> AttentionPlan:
    causal_rows, branch_rows = _rectangle(causal), _rectangle([run for run, _, _ in branches])
    output_index = np.zeros(total, dtype=np.int64)
    for rows, runs, offset in ((causal_rows, causal, 0), (branch_rows, [b[0] for b in branches], causal_rows.size)):
        for row, run in enumerate(runs):
            output_index[run] = offset + row * rows.shape[1] + np.arange(run.size)
    return AttentionPlan(
        causal_rows=causal_rows,
        branch_rows=branch_rows,
        branch_prompts=np.array([prompt for _, prompt, _ in branches], dtype=np.int64),
        prompt_lengths=np.array([size for _, _, size in branches], dtype=np.int64),
        output_index=output_index,
    )


def _pad_rows(chosen: Sequence[TrainSequence], members: Sequence[int]) -> TokenBatch:
    rows = [[*s.prompt_token_ids, *s.completion_token_ids[:-1]] for s in chosen]
    width = max(map(len, rows))
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    predictors = []
    for r, (row, sequence) in enumerate(zip(rows, chosen, strict=True)):
        input_ids[r, : len(row)] = row
        mask[r, : len(row)] = True
        first = r * width + len(sequence.prompt_token_ids) - 1
        predictors.append(first + np.arange(len(sequence.completion_token_ids)))
    return TokenBatch(
        input_ids=input_ids,
        position_ids=np.broadcast_to(np.arange(width), input_ids.shape).copy(),
        predictors=np.concatenate(predictors).astype(np.int64),
        members=np.asarray(members, dtype=np.int64),
        attention_mask=mask,
        **_completion_arrays(chosen),
    )


def _completion_arrays(chosen: Sequence[TrainSequence]) -> dict[str, Any]:
    lengths = np.array([len(s.completion_token_ids) for s in chosen], dtype=np.int64)
    targets = [np.asarray(s.completion_token_ids, dtype=np.int64) for s in chosen]
    return {
        "targets": np.concatenate(targets),
        "sequence": np.repeat(np.arange(len(chosen)), lengths),
        "lengths": lengths,
    }


def _rectangle(runs: Sequence[np.ndarray]) -> np.ndarray:
    rows = np.zeros((len(runs), max((run.size for run in runs), default=0)), dtype=np.int64)
    for row, run in zip(rows, runs, strict=True):
        row[: run.size] = run
    return rows
