"""How hard a problem was for a policy: its pass rate in recorded rollouts, asked of the store by SQL."""

from __future__ import annotations

from typing import Any

LATEST_RATES = """
WITH tried AS (
  SELECT problem_id, run_id, coalesce(round, 0) AS round, avg(correct) AS rate
  FROM rollouts JOIN rewards USING (rollout_id)
  WHERE purpose IN ('train', 'probe') AND correct IS NOT NULL AND coalesce(round, 0) < $before
  GROUP BY problem_id, run_id, coalesce(round, 0)
)
SELECT problem_id, arg_max(rate, (round, run_id)) FROM tried GROUP BY problem_id
"""
"""Of each problem the share of correct completions in the last round that put it; unscored completions do not count."""
EVERY_ROUND = 1 << 30


def pass_rates(connection: Any, before_round: int = EVERY_ROUND) -> dict[str, float]:
    """problem_id → pass rate in [0, 1] from the rounds before ``before_round``; problems never scored are left out.

    ``connection`` is one of ``pipeline.store.connect``: of one run (its ancestors' rollouts included) or of several.
    """
    rows = connection.execute(LATEST_RATES, {"before": before_round}).fetchall()
    return {problem_id: float(rate) for problem_id, rate in rows}
