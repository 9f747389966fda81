"""The SQL behind a report, over the views of one run."""

STEPS = """
    WITH sampled AS (
        SELECT r.round, r.step, count(*) AS rollouts, avg(w.reward) AS reward, avg(w.correct) AS correct,
               avg((w.reward IS NULL)::INT) AS unscored_share, avg(r.completion_length) AS length,
               avg((r.finish_reason = 'length')::INT) AS truncated_share,
               sum(r.completion_length) AS completion_tokens{components}
        FROM rollouts r JOIN rewards w USING (rollout_id) WHERE r.purpose = 'train' GROUP BY r.round, r.step
    ), learnt AS (
        SELECT round, step, avg(kl) AS kl, avg(entropy) AS entropy, avg(grad_norm) AS grad_norm, avg(lr) AS lr,
               avg(logprob_gap_mean) AS gap_mean, max(logprob_gap_max) AS gap_max, avg(clip_low + clip_high) AS clipped,
               avg(zero_variance_share) AS zero_variance_share
        FROM updates WHERE round IS NOT NULL GROUP BY round, step
    )
    SELECT * FROM sampled LEFT JOIN learnt USING (round, step) ORDER BY round, step
"""
TOKENS = """
    SELECT stage, count(*) AS rollouts, sum(len(prompt_token_ids)) AS prompt_tokens,
           sum(completion_length) AS completion_tokens
    FROM rollouts WHERE run_id = ? GROUP BY stage
"""
SAMPLES = """
    SELECT r.problem_id, r.sample_index, w.answer, w.correct::BOOLEAN AS correct, w.status, r.finish_reason,
           r.completion_length AS n_tokens, r.temperature = 0 AS greedy
    FROM rollouts r JOIN rewards w USING (rollout_id) WHERE r.stage = ? AND r.purpose = 'evaluate'
    ORDER BY r.problem_id, r.sample_index
"""
SUPERVISED = """
    SELECT stage, step AS number, loss FROM updates WHERE round IS NULL AND loss IS NOT NULL ORDER BY stage, step
"""
EVENTS = """
    SELECT kind, severity, count(*) AS times, arg_max(message, "at") AS message
    FROM events WHERE severity <> 'info' GROUP BY kind, severity ORDER BY severity, times DESC, kind
"""
PUT = """
    SELECT count(DISTINCT problem_id) AS problems,
           max(CASE WHEN temperature > 0 THEN sample_index + 1 ELSE 0 END) AS samples, max(temperature) AS temperature,
           coalesce(any_value(top_p) FILTER (temperature > 0), 1) AS top_p, max(max_tokens) AS max_tokens,
           coalesce(bool_or(temperature = 0), false) AS greedy, any_value(engine) AS engine
    FROM rollouts WHERE stage = ? AND purpose = 'evaluate'
"""
COMPLETIONS = """
    SELECT r.rollout_id, r.text, w.correct::BOOLEAN AS correct, w.status, w.answer, r.finish_reason,
           r.completion_length AS n_tokens
    FROM rollouts r JOIN rewards w USING (rollout_id)
    WHERE r.stage = ? AND r.problem_id = ? AND r.purpose = 'evaluate' AND r.temperature > 0 ORDER BY r.sample_index
"""
