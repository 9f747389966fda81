r"""Problems → prompts: a Jinja template, then the model's chat template; and worked solutions in the answer format asked for.

Token ids are made once, here. After a chat template nothing is added to them: templates write their own BOS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.config import DataConfig
from pipeline.types import Problem

NAMED = ("boxed", "gsm8k_fewshot", "plain", "r1_think")
FOR_BASE_MODELS = frozenset({"gsm8k_fewshot", "r1_think"})


def render(problems: Sequence[Problem], tokenizer: Any, config: DataConfig) -> list[Problem]:
    """The problems with ``prompt``, ``prompt_token_ids`` and (where there is one) the solution in the answer format.

    A prompt that is certainly over ``max_prompt_tokens`` by its length in characters gets no token ids: it is left to
    the caller to set aside. Raises ValueError for a missing template or a tokenizer without a chat template.
    """
    template = _template(config.template)
    to_prompt = _prompter(tokenizer, config)
    longest = _longest_token(tokenizer) * (config.max_prompt_tokens + 64)
    rendered = []
    shared: dict[int, int] = {}  # one object an id in all prompts: 8 bytes a token instead of 36, of a million prompts
    for problem in problems:
        final = _final(config.answer_format)
        if len(problem.problem) > longest:
            rendered.append(replace(problem, prompt=problem.problem[:1000] + " …", prompt_token_ids=()))
            continue
        text = template(problem=problem.problem, answer_format=config.answer_format, final=final, row=problem)
        prompt, ids = to_prompt(text)
        solution = _solution(problem, config)
        prompt_token_ids = tuple(shared.setdefault(id_, id_) for id_ in ids)
        rendered.append(replace(problem, prompt=prompt, prompt_token_ids=prompt_token_ids, solution=solution))
    return rendered


def training_pair(problem: Problem, tokenizer: Any) -> tuple[list[int], list[int]]:
    """(prompt ids, completion ids) of a rendered problem with a solution; the completion ends with the EOS id.

    Raises ValueError when the problem has no prompt or no solution, or the tokenizer no EOS.
    """
    if not problem.prompt_token_ids or problem.solution is None:
        missing = "solution" if problem.prompt_token_ids else "rendered prompt"
        raise ValueError(
            f"problem {problem.problem_id} of {problem.source!r} has no {missing}: it cannot be trained on"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, so a completion could never end; set tokenizer.eos_token")
    ids = tokenizer.encode(problem.solution, add_special_tokens=False)
    return list(problem.prompt_token_ids), [*ids, tokenizer.eos_token_id]


# -- templates --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _template(name: str) -> Callable[..., str]:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if name in NAMED:
        source = (resources.files("data") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    elif Path(name).is_file():
        source = Path(name).read_text(encoding="utf-8")
    else:
        raise ValueError(f"data.template {name!r}: expected one of {', '.join(NAMED)}, or a path to a Jinja file")
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
    try:
        template = environment.from_string(source)
        render_one: Callable[..., str] = template.render
        probe = render_one(problem="QUESTION", answer_format="boxed", final=_final("boxed"), row=_PROBE)
    except jinja2.TemplateError as error:
        raise ValueError(f"data.template {name!r}: {error}; variables: problem, answer_format, final, row") from None
    if "QUESTION" not in probe:
        raise ValueError(f"data.template {name!r} does not show the problem: write {{{{ problem }}}} where it belongs")
    return render_one


_PROBE = Problem(problem_id="probe", problem="QUESTION", answer="1")


def _final(answer_format: str) -> Callable[[str], str]:
    """The sentence that states an answer in the format: used by few-shot templates and worked solutions alike."""
    if answer_format == "tags":
        return lambda answer: f"<answer>{answer}</answer>"
    return lambda answer: f"The answer is \\boxed{{{answer}}}."


def _solution(problem: Problem, config: DataConfig) -> str | None:
    """The worked solution, ending with the answer in the format; a box that is already there stays as it is."""
    if problem.solution is None or "tests" in problem.meta:  # a program has no answer to be marked
        return problem.solution
    body = problem.solution.strip()
    if config.template == "r1_think":
        return f" {_unboxed(body)} </think> {_final('tags')(problem.answer)}"
    done = r"\boxed" in body if config.answer_format == "boxed" else "</answer>" in body
    text = body if done else f"{body}\n{_final(config.answer_format)(problem.answer)}"
    return f" {text}" if config.template == "gsm8k_fewshot" else text


def _unboxed(text: str) -> str:
    r"""The text with ``\boxed{x}`` opened to ``x`` (innermost boxes only, braces without nesting)."""
    return re.sub(r"\\boxed\{([^{}]*)\}", r"\1", text)


# -- tokens -----------------------------------------------------------------------------------------------------


def _prompter(tokenizer: Any, config: DataConfig) -> Callable[[str], tuple[str, list[int]]]:
    raw = config.chat == "none" or (config.chat == "auto" and config.template in FOR_BASE_MODELS)
    if raw:
        if config.system_prompt is not None or config.thinking is not None:
            raise ValueError(
                f"data.template {config.template!r} does not use the chat template, so data.system_prompt and "
                f"data.thinking have no effect: remove them or set data.chat='model'"
            )
        return lambda text: _raw_prompt(text, tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError(
            f"the model's tokenizer has no chat template, which data.template {config.template!r} needs: use an instruct "
            f"model, data.template='gsm8k_fewshot', or data.chat='none'"
        )
    options: dict[str, Any] = {}
    if config.thinking is not None:
        if "enable_thinking" not in str(template):
            raise ValueError(
                "data.thinking is set, but the model's chat template has no enable_thinking switch: remove it"
            )
        options["enable_thinking"] = config.thinking
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt is not None else []

    def chat_prompt(text: str) -> tuple[str, list[int]]:
        messages = [*system, {"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return prompt, _single_bos(
            tokenizer.encode(prompt, add_special_tokens=False, verbose=False), tokenizer.bos_token_id
        )

    return chat_prompt


def _raw_prompt(text: str, tokenizer: Any) -> tuple[str, list[int]]:
    """The text itself, after one BOS where the tokenizer starts its sequences with one; never an EOS."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    bos = tokenizer.bos_token_id
    starts = bos is not None and tokenizer.encode("1")[:1] == [bos]
    if not starts:
        return text, ids
    return f"{tokenizer.bos_token}{text}", _single_bos([bos, *ids], bos)


def _single_bos(ids: list[int], bos: int | None) -> list[int]:
    """The ids with a run of BOS at the start cut to one."""
    start = 0
    while bos is not None and start + 1 < len(ids) and ids[start] == ids[start + 1] == bos:
        start += 1
    return ids[start:]


def _longest_token(tokenizer: Any) -> int:
    """Characters in the vocabulary's longest token: no text has fewer tokens than its length over this."""
    return max(map(len, tokenizer.get_vocab()), default=1)
