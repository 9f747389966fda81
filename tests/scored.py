"""Problems and rollouts for the tests of rewards, with only what matters to the test spelled out."""

from pipeline.types import Problem, Rollout


def problem(answer: str = "4", *, problem_id: str = "p", tests=None, **fields) -> Problem:
    meta = {} if tests is None else {"tests": tests}
    return Problem(problem_id, fields.pop("problem", "What is 2 + 2?"), answer, meta=meta, **fields)


def rollout(text: str, *, problem_id: str = "p", index: int = 0, tokens: int = 10, **fields) -> Rollout:
    known = {
        "rollout_id": f"{problem_id}-{index}", "run_id": "run", "stage": "s", "purpose": "train", "round": 1, "step": 1,
        "group_id": f"g-{problem_id}", "problem_id": problem_id, "sample_index": index, "seed": 0, "policy_version": "v",
        "policy_checksum": "c", "engine": "transformers", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "max_tokens": 20, "prompt_token_ids": [1, 2], "completion_token_ids": list(range(tokens)),
        "sampling_logprobs": [-0.1] * tokens, "finish_reason": "stop", "text": text,
    }  # fmt: skip
    return Rollout(**{**known, **fields})
