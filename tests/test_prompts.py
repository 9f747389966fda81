"""Prompts as the model sees them: templates, the chat template, one BOS, and solutions in the answer format."""

import pytest

from data.prompts import render, training_pair
from pipeline.config import DataConfig
from pipeline.types import Problem
from tests.tokenizers_for_tests import bos_tokenizer, embedded_tokenizer

SUM = Problem(problem_id="a", problem="What is 2+3?", answer="5", solution="2+3=5")
PLAIN = DataConfig(template="plain")


def rendered(problem=SUM, tokenizer=None, **config):
    return render([problem], tokenizer or embedded_tokenizer(), DataConfig(**config))[0]


def test_the_prompt_is_the_chat_template_around_the_problem():
    problem = rendered(template="plain")
    assert problem.prompt == "<|user|>What is 2+3?<|end|><|assistant|>"
    assert embedded_tokenizer().decode(problem.prompt_token_ids) == problem.prompt


def test_a_system_prompt_comes_first():
    problem = rendered(template="plain", system_prompt="Be brief.")
    assert problem.prompt == "<|system|>Be brief.<|end|><|user|>What is 2+3?<|end|><|assistant|>"


@pytest.mark.parametrize("template", ["plain", "boxed", "gsm8k_fewshot"])
def test_there_is_exactly_one_bos_and_no_eos(template):
    tokenizer = bos_tokenizer()
    problem = rendered(tokenizer=tokenizer, template=template, max_prompt_tokens=4000)
    assert problem.prompt_token_ids[0] == tokenizer.bos_token_id
    assert problem.prompt_token_ids.count(tokenizer.bos_token_id) == 1
    # The chat template's own </s> ends the user's turn; a raw prompt has none.
    assert problem.prompt_token_ids.count(tokenizer.eos_token_id) == (0 if template == "gsm8k_fewshot" else 1)
    assert problem.prompt_token_ids[-1] != tokenizer.eos_token_id


def test_a_template_that_doubles_the_bos_gives_one():
    tokenizer = bos_tokenizer("{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}")
    ids = rendered(tokenizer=tokenizer, template="plain").prompt_token_ids
    assert ids[:2].count(tokenizer.bos_token_id) == 1
    # <s> and the 12 bytes of "What is 2+3?"
    assert len(ids) == 13


def test_a_chat_template_without_bos_stays_without():
    tokenizer = bos_tokenizer("{{ messages[0]['content'] }}")
    assert tokenizer.bos_token_id not in rendered(tokenizer=tokenizer, template="plain").prompt_token_ids


def test_the_thinking_switch_reaches_the_chat_template():
    assert rendered(tokenizer=bos_tokenizer(), template="plain", thinking=False).prompt.endswith("<think></think>")
    assert rendered(tokenizer=bos_tokenizer(), template="plain").prompt.endswith("[assistant]")
    with pytest.raises(ValueError, match="no enable_thinking switch"):
        rendered(template="plain", thinking=False)


def test_a_model_without_a_chat_template_is_told_how_to_go_on():
    with pytest.raises(ValueError, match=r"no chat template.*data\.chat='none'"):
        rendered(tokenizer=bos_tokenizer(None), template="plain")
    assert rendered(tokenizer=bos_tokenizer(None), template="plain", chat="none").prompt == "<s>What is 2+3?"


def test_templates_for_base_models_go_in_as_they_are():
    problem = rendered(template="r1_think", answer_format="tags", max_prompt_tokens=2000)
    assert problem.prompt.endswith("User: What is 2+3?\nAssistant: <think>")
    assert "<|user|>" not in problem.prompt
    with pytest.raises(ValueError, match="does not use the chat template"):
        rendered(template="gsm8k_fewshot", system_prompt="Be brief.")


def test_special_tokens_in_a_problem_do_not_add_a_bos():
    ids = rendered(
        Problem(problem_id="x", problem="<s><s>1+1?", answer="2"), bos_tokenizer(), template="plain", chat="none"
    )
    assert ids.prompt_token_ids[:2].count(0) == 1


def test_a_users_own_template_is_a_jinja_file(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("Q: {{ problem }} ({{ row.subject }}, level {{ row.level }})")
    problem = Problem(problem_id="a", problem="1+1?", answer="2", subject="sums", level=2)
    assert rendered(problem, template=str(file), chat="none").prompt == "Q: 1+1? (sums, level 2)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ question }}", "'question' is undefined; variables: problem"),
        ("{{ problem", "mine.jinja"),
        ("Solve it.", "does not show the problem"),
        ("{{ ''.__class__.__mro__ }}{{ problem }}", "unsafe"),
    ],
)
def test_a_bad_template_is_one_line(tmp_path, text, message):
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        rendered(template=str(file), chat="none")


def test_an_unknown_template_names_those_there_are():
    with pytest.raises(ValueError, match="expected one of boxed, gsm8k_fewshot, plain, r1_think, or a path"):
        rendered(template="boxd")


def test_template_and_answer_format_must_agree():
    with pytest.raises(ValueError, match=r"set data\.answer_format='tags'"):
        DataConfig(template="r1_think")


@pytest.mark.parametrize(
    ("solution", "config", "expected"),
    [
        ("2+3=5", {"template": "plain"}, "2+3=5\nThe answer is \\boxed{5}."),
        ("so \\boxed{5}", {"template": "plain"}, "so \\boxed{5}"),
        ("2+3=5", {"template": "plain", "answer_format": "tags"}, "2+3=5\n<answer>5</answer>"),
        ("2+3=5", {"template": "gsm8k_fewshot"}, " 2+3=5\nThe answer is \\boxed{5}."),
        ("so \\boxed{5}", {"template": "r1_think", "answer_format": "tags"}, " so 5 </think> <answer>5</answer>"),
    ],
)
def test_a_solution_ends_with_the_answer_in_the_format(solution, config, expected):
    problem = Problem(problem_id="a", problem="2+3?", answer="5", solution=solution)
    assert rendered(problem, max_prompt_tokens=2000, **config).solution == expected


def test_a_training_pair_is_prompt_ids_and_solution_ids_with_the_end():
    tokenizer = embedded_tokenizer()
    problem = rendered(template="plain")
    prompt, completion = training_pair(problem, tokenizer)
    assert prompt == list(problem.prompt_token_ids)
    assert tokenizer.decode(completion) == problem.solution + "<|end|>"
    assert completion.count(tokenizer.eos_token_id) == 1


def test_a_pair_needs_a_prompt_and_a_solution():
    with pytest.raises(ValueError, match="no rendered prompt"):
        training_pair(SUM, embedded_tokenizer())
    with pytest.raises(ValueError, match="no solution"):
        training_pair(
            rendered(Problem(problem_id="a", problem="1?", answer="1"), template="plain"), embedded_tokenizer()
        )


def test_a_ten_megabyte_problem_is_not_tokenised():
    problem = rendered(Problem(problem_id="a", problem="x" * 10_000_000, answer="1"), template="plain")
    assert problem.prompt_token_ids == ()
    assert len(problem.prompt) < 2000
