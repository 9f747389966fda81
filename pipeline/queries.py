"""Named queries over the views: ``grpoflow sql --list`` shows them, ``--named NAME`` asks one.

All but those that show texts read the view ``scored``, which holds no token ids and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.schema import COMPONENT_PREFIX
from pipeline.sqltext import name as quoted_name
from pipeline.sqltext import quote

Sql = str | Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class NamedQuery:
    """``sql`` is the text, or a function of the reward components that the store has. ``tokens``: reads texts."""

    about: str
    sql: Sql
    tokens: bool = False


TEXTS = """
WITH chosen AS (
  SELECT rollout_id, answer, completion_length, finish_reason FROM scored WHERE correct = {correct}
  ORDER BY completion_length {order}, rollout_id LIMIT 20)
SELECT rollout_id, run_id, stage, problem_id, chosen.completion_length, chosen.finish_reason, chosen.answer AS answered,
  problems.answer AS gold, text
FROM chosen JOIN rollouts USING (rollout_id) LEFT JOIN problems USING (problem_id)
ORDER BY chosen.completion_length {order}, rollout_id
"""

BY_ROUND = """
SELECT run_id, round, count(*) AS rollouts, avg(correct) AS pass_rate, avg(reward) AS reward,
  count(*) - count(reward) AS unscored, avg((finish_reason = 'length')::INT) AS truncated_share,
  avg(completion_length) AS mean_tokens
FROM scored WHERE purpose = 'train' GROUP BY ALL ORDER BY run_id, round
"""

BY_PROBLEM = """
SELECT problem_id, round, count(*) AS rollouts, avg(correct) AS pass_rate, avg(reward) AS reward
FROM scored WHERE purpose = 'train' GROUP BY ALL ORDER BY problem_id, round
"""

LEARNT = """
WITH rates AS (
  SELECT run_id, problem_id, round, avg(correct) AS pass_rate FROM scored
  WHERE purpose = 'train' AND correct IS NOT NULL GROUP BY ALL),
ends AS (
  SELECT run_id, problem_id, min(round) AS first_round, max(round) AS last_round, min_by(pass_rate, round) AS before,
    max_by(pass_rate, round) AS after FROM rates GROUP BY ALL HAVING max(round) > min(round))
SELECT run_id, problem_id, first_round, last_round, before, after, after - before AS change,
  CASE WHEN after > before THEN 'learnt' ELSE 'forgotten' END AS what
FROM ends WHERE before <> after ORDER BY change DESC, run_id, problem_id
"""

SUSPECTS = """
WITH rates AS (
  SELECT run_id, problem_id, round, avg(reward) AS reward, avg(correct) AS pass_rate, count(reward) AS rollouts
  FROM scored WHERE purpose = 'train' AND reward IS NOT NULL GROUP BY ALL),
moves AS (
  SELECT *, reward - lag(reward) OVER w AS reward_change, pass_rate - lag(pass_rate) OVER w AS pass_rate_change
  FROM rates WINDOW w AS (PARTITION BY run_id, problem_id ORDER BY round))
SELECT run_id, problem_id, round, rollouts, reward, reward_change, pass_rate, pass_rate_change FROM moves
WHERE reward_change > 0 AND pass_rate_change < 0 ORDER BY reward_change - pass_rate_change DESC, run_id, problem_id LIMIT 100
"""

ADVANTAGES = """
SELECT run_id, round, step, count(*) AS rollouts, count(*) - count(advantage) AS uncredited,
  avg(zero_variance) AS zero_variance_share, min(advantage) AS least, avg(abs(advantage)) AS mean_size,
  stddev_pop(advantage) AS spread, max(advantage) AS largest
FROM scored WHERE purpose = 'train' GROUP BY ALL ORDER BY run_id, round, step
"""

DUPLICATES = """
WITH members AS (
  SELECT run_id, round, list(completion_hash) AS hashes FROM scored WHERE purpose = 'train'
  GROUP BY run_id, round, group_id)
SELECT run_id, round, count(*) AS groups, sum(len(hashes))::BIGINT AS completions,
  1 - sum(list_unique(hashes)) / sum(len(hashes)) AS duplicate_share, avg(list_unique(hashes)) AS distinct_in_group
FROM members GROUP BY ALL ORDER BY run_id, round
"""

TRUNCATED = """
SELECT level, round, count(*) AS rollouts, avg((finish_reason = 'length')::INT) AS truncated_share,
  avg(correct) AS pass_rate, avg(completion_length) AS mean_tokens
FROM (SELECT problem_id, round, finish_reason, correct, completion_length FROM scored WHERE purpose = 'train')
LEFT JOIN (SELECT problem_id, level FROM problems) USING (problem_id) GROUP BY ALL ORDER BY level, round
"""

GAP = """
SELECT run_id, round, step, avg(logprob_gap_mean) AS gap_mean, max(logprob_gap_max) AS gap_max, min(ess) AS least_ess,
  max(ratio_max) AS ratio_max, avg(kl) AS kl
FROM updates WHERE round IS NOT NULL GROUP BY ALL ORDER BY run_id, round, step
"""

COST_BY_STAGE = """
WITH sampled AS (
  SELECT run_id, stage, count(*) AS rollouts, sum(completion_length)::BIGINT AS tokens FROM scored GROUP BY ALL)
SELECT run_id, kind, count(*) AS stages, sum(seconds) AS seconds, sum(rollouts)::BIGINT AS rollouts,
  sum(tokens)::BIGINT AS tokens, sum(tokens) / nullif(sum(seconds), 0) AS tokens_per_second
FROM stages LEFT JOIN sampled USING (run_id, stage) GROUP BY ALL ORDER BY run_id, seconds DESC
"""

COST_PER_SOLVED = """
SELECT run_id, round, count(*) AS rollouts, count(DISTINCT problem_id) AS problems,
  count(DISTINCT problem_id) FILTER (correct) AS solved, sum(completion_length)::BIGINT AS tokens,
  sum(completion_length) / nullif(count(DISTINCT problem_id) FILTER (correct), 0) AS tokens_per_solved,
  sum(completion_length) / nullif(sum(correct), 0) AS tokens_per_correct
FROM scored WHERE purpose = 'train' GROUP BY ALL ORDER BY run_id, round
"""

STATUSES = """
SELECT run_id, purpose, status, count(*) AS rollouts, avg(grading_seconds) AS mean_seconds,
  max(grading_seconds) AS longest_seconds, avg(reward) AS reward
FROM scored GROUP BY ALL ORDER BY run_id, purpose, rollouts DESC
"""

EVALUATIONS = """
SELECT run_id, checkpoint, benchmark, metric, k, value, low, high, n_problems, n_samples FROM evaluations
WHERE slice = 'all' ORDER BY benchmark, metric, k, run_id, checkpoint
"""

CURVE = """
SELECT run_id, round, step, avg(loss) AS loss, avg(kl) AS kl, avg(entropy) AS entropy, avg(grad_norm) AS grad_norm,
  avg(clip_low) + avg(clip_high) AS clipped_share, avg(zero_variance_share) AS zero_variance_share, max(lr) AS lr,
  sum(tokens) AS tokens
FROM updates WHERE round IS NOT NULL GROUP BY ALL ORDER BY run_id, round, step
"""

NEVER = """
SELECT problem_id, count(*) AS rollouts, avg(reward) AS reward, avg((finish_reason = 'length')::INT) AS truncated_share,
  mode(scored.answer) AS usual_answer, any_value(problems.answer) AS gold, any_value(level) AS level,
  any_value(problem) AS problem
FROM scored JOIN problems USING (problem_id)
WHERE problem_id IN (SELECT problem_id FROM scored WHERE correct IS NOT NULL GROUP BY 1 HAVING sum(correct) = 0)
GROUP BY problem_id ORDER BY rollouts DESC, problem_id LIMIT 100
"""

EVENTS = """
SELECT run_id, "at", stage, kind, severity, value, "limit", message FROM events ORDER BY "at", run_id, stage
"""

VERSIONS = """
SELECT run_id, stage, policy_version, count(*) AS rollouts, avg(temperature) AS temperature,
  sum(completion_length)::BIGINT AS tokens FROM scored GROUP BY ALL ORDER BY run_id, stage, policy_version
"""


def components_sql(components: Sequence[str]) -> str:
    """Each component's mean where correct and where wrong, and its correlation with correctness."""
    if not components:
        raise ValueError(
            "no rewards are recorded yet, so there are no components to compare; ask again after a reward stage"
        )
    one = (
        "SELECT {label} AS component, count({column}) AS scored, avg({column}) AS mean, "
        "avg({column}) FILTER (correct) AS mean_correct, avg({column}) FILTER (NOT correct) AS mean_wrong, "
        "corr({column}, correct) AS correlation FROM scored"
    )
    return " UNION ALL ".join(
        one.format(label=quote(name), column=quoted_name(COMPONENT_PREFIX + name)) for name in components
    )


def reward_model_sql(components: Sequence[str]) -> str:
    """The reward model's mean score by verdict and round, its correlation with it, and its accuracy at 0.5."""
    if "reward_model" not in components:
        raise ValueError(
            "no rollout was scored by a reward model: give rewards.weights.reward_model a weight in a recipe"
        )
    return f"""
SELECT run_id, round, count(*) AS rollouts, avg(score) FILTER (correct) AS mean_correct,
  avg(score) FILTER (NOT correct) AS mean_wrong, corr(score, correct) AS correlation,
  avg(((score > 0.5) = correct::BOOLEAN)::INT) AS accuracy
FROM (SELECT run_id, round, correct, {COMPONENT_PREFIX}reward_model AS score FROM scored WHERE purpose = 'train')
WHERE score IS NOT NULL AND correct IS NOT NULL GROUP BY ALL ORDER BY run_id, round
"""


QUERIES: dict[str, NamedQuery] = {
    "rounds": NamedQuery("pass rate, reward, truncation and length by round", BY_ROUND),
    "pass_rate": NamedQuery("pass rate by problem and round", BY_PROBLEM),
    "learnt_forgotten": NamedQuery(
        "problems whose pass rate rose or fell from their first round to their last", LEARNT
    ),
    "longest_correct": NamedQuery("the 20 longest correct completions", TEXTS.format(correct=1, order="DESC"), True),
    "shortest_wrong": NamedQuery("the 20 shortest wrong completions", TEXTS.format(correct=0, order="ASC"), True),
    "components": NamedQuery("each reward component against correctness", components_sql),
    "hacking_suspects": NamedQuery("problems whose reward went up while the verifier's verdict went down", SUSPECTS),
    "reward_model": NamedQuery("the reward model against the verifier, by round", reward_model_sql),
    "advantages": NamedQuery("spread of advantages and share of groups without signal, by step", ADVANTAGES),
    "duplicates": NamedQuery("duplicate completions and distinct ones in a group, by round", DUPLICATES),
    "truncated": NamedQuery("truncated share by level and round", TRUNCATED),
    "gap": NamedQuery("sampler-learner gap, effective sample size and ratios, by step", GAP),
    "stages": NamedQuery("seconds, tokens and rollouts by kind of stage", COST_BY_STAGE),
    "cost": NamedQuery("tokens per solved problem and per correct completion, by round", COST_PER_SOLVED),
    "statuses": NamedQuery("what the verifier said, how often and how long it took", STATUSES),
    "evaluations": NamedQuery("every metric of every checkpoint, with its interval", EVALUATIONS),
    "curve": NamedQuery("loss, KL, entropy and gradient norm by step", CURVE),
    "never_solved": NamedQuery("problems with the most completions and no correct one", NEVER, True),
    "events": NamedQuery("what guards, cost targets and timeouts saw and did", EVENTS),
    "versions": NamedQuery("which policy version sampled what", VERSIONS),
}


def named_sql(name: str, components: Sequence[str]) -> str:
    """The text of a named query for a store with these components; ValueError names the queries there are."""
    if name not in QUERIES:
        raise ValueError(f"query {name!r} is unknown; expected one of {', '.join(QUERIES)}")
    sql = QUERIES[name].sql
    return (sql if isinstance(sql, str) else sql(components)).strip()
