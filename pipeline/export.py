"""Training sets from recorded rollouts: supervised pairs, or preferences, as JSON lines or Parquet for ``datasets``."""

from __future__ import annotations

from pathlib import Path

from pipeline.ask import sql
from pipeline.results import write_result_rows

CHOSEN = """
candidates AS (
  SELECT run_id, rollout_id, problem_id, group_id, correct, status, reward, finish_reason, completion_hash FROM scored
  WHERE purpose IN ('train', 'reject') AND ({where})),
distinct_ones AS (
  SELECT * FROM candidates
  QUALIFY row_number() OVER (PARTITION BY problem_id, completion_hash ORDER BY rollout_id) = 1)
"""

SFT = """
WITH {chosen}, kept AS (
  SELECT rollout_id, reward FROM distinct_ones WHERE correct AND finish_reason = 'stop'
  QUALIFY row_number() OVER (PARTITION BY problem_id ORDER BY reward DESC NULLS LAST, rollout_id) <= {per_problem})
SELECT problems.prompt, rollouts.text AS completion, problem_id, problems.answer, kept.reward, rollout_id, rollouts.run_id,
  rollouts.round, rollouts.policy_version
FROM kept JOIN rollouts USING (rollout_id) JOIN problems USING (problem_id) ORDER BY problem_id, rollout_id
"""

PREFERENCE = """
WITH {chosen}, ranked AS (
  SELECT *, row_number() OVER (PARTITION BY group_id, correct ORDER BY rollout_id) AS place FROM distinct_ones
  WHERE (correct AND finish_reason = 'stop') OR NOT correct),
pairs AS (
  SELECT good.problem_id, good.rollout_id AS chosen_id, bad.rollout_id AS rejected_id, good.reward AS chosen_reward,
    bad.reward AS rejected_reward
  FROM ranked AS good JOIN ranked AS bad ON good.group_id = bad.group_id AND good.place = bad.place
  WHERE good.correct AND NOT bad.correct
  QUALIFY row_number() OVER (PARTITION BY good.problem_id ORDER BY good.rollout_id) <= {per_problem})
SELECT problems.prompt, good.text AS chosen, bad.text AS rejected, pairs.problem_id, chosen_reward, rejected_reward,
  chosen_id, rejected_id, good.run_id, good.round, good.policy_version
FROM pairs JOIN rollouts AS good ON good.rollout_id = chosen_id JOIN rollouts AS bad ON bad.rollout_id = rejected_id
JOIN problems ON problems.problem_id = pairs.problem_id ORDER BY pairs.problem_id, chosen_id
"""


def export(
    run: str, kind: str, out: Path, *, root: Path | str = "runs", where: str = "true", per_problem: int = 4
) -> int:
    """Write a training set of a run's training rollouts (its ancestors' included) and return its rows.

    ``sft``: prompt and completion of correct, finished, distinct completions, the best paid first. ``preference``:
    prompt, chosen and rejected, a correct finished and a wrong completion of the same group. At most ``per_problem`` of
    each problem. ``where`` is an SQL condition on the view ``scored``, such as ``round = 2 AND reward_format = 1``.
    Evaluation rollouts are never exported: their problems are held out. Texts have no special tokens, so that a trainer
    puts its own end. Raises ValueError when nothing fits; then no file is written.
    """
    if kind not in ("sft", "preference"):
        raise ValueError(f"--kind {kind}: expected sft or preference")
    if out.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"--out {out}: expected a name that ends in .jsonl or .parquet")
    if per_problem < 1:
        raise ValueError(f"--per-problem {per_problem}: expected at least 1")
    if not where.strip():
        raise ValueError("--where: is empty; leave it out to choose among all training rollouts")
    text = (SFT if kind == "sft" else PREFERENCE).format(chosen=CHOSEN.format(where=where), per_problem=per_problem)
    table = sql(text, run, root=root)
    if not len(table):
        raise ValueError(
            f"run {run}: no training rollout fits a {kind} set where {where}; "
            f"`grpoflow sql --run {run} --named statuses` shows what there is"
        )
    write_result_rows(table.to_reader(), "table", out, Path(root))
    return len(table)
