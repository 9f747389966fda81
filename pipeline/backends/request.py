"""What every sampler checks before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.protocols import SamplingParams


def check_request(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seeds: Sequence[Sequence[int]],
    *,
    context: int | None,
    vocabulary: int | None,
) -> None:
    """ValueError, in one line, for a request that no engine can answer.

    ``context`` is the longest prompt plus completion, ``vocabulary`` the number of token ids; None
    leaves that check to the engine.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts but {len(seeds)} lists of seeds: one list a prompt is expected")
    if not prompts or any(not prompt for prompt in prompts):
        raise ValueError("sample was given no prompt, or a prompt without tokens: each needs at least one")
    if params.max_tokens < 1 or params.temperature < 0:
        raise ValueError(
            f"sample was given max_tokens {params.max_tokens} and temperature {params.temperature}: expected at least 1 "
            f"token and a temperature of 0 (greedy) or more"
        )
    largest = max(max(prompt) for prompt in prompts)
    if vocabulary is not None and (largest >= vocabulary or min(min(prompt) for prompt in prompts) < 0):
        raise ValueError(
            f"a prompt's token id {largest} is out of vocabulary: the model knows ids 0 to {vocabulary - 1}; was the "
            f"prompt encoded with another model's tokenizer?"
        )
    longest = max(len(prompt) for prompt in prompts)
    if context and longest + params.max_tokens > context:
        raise ValueError(
            f"the longest prompt ({longest} tokens) and max_tokens ({params.max_tokens}) exceed the model's context of "
            f"{context} tokens: lower sampler.max_tokens (or evaluate.max_tokens) or data.max_prompt_tokens"
        )
