"""The built-in components by name, and what is said of a name that is none of them."""

import pytest

from pipeline.config import RewardConfig
from rewards.components import BUILT_IN, PURE, Item, check_names
from rewards.verifier import Verdict
from tests.scored import problem, rollout


def item(text="\\boxed{4}", status="correct", **fields):
    return Item(problem(), rollout(text, **fields), Verdict(status, "4", "test"))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("correct", 1.0),
        ("incorrect", 0.0),
        ("no_answer", 0.0),
        ("timeout", None),
        ("error", None),
        ("gold_unparsable", None),
    ],
)
def test_only_correct_pays_and_a_failure_to_judge_is_no_zero(status, expected):
    assert PURE["verifier"](item(status=status), RewardConfig(), "boxed") == expected


def test_length_pays_the_correct_and_the_wrong_by_their_own_ends():
    config = RewardConfig(length_shape="linear", length_correct=(1.0, 0.5), length_wrong=(-1.0, 0.0))
    # 10 of at most 20 tokens: half way, 0.75 and -0.5.
    assert PURE["length"](item(), config, "boxed") == 0.75
    assert PURE["length"](item(status="incorrect"), config, "boxed") == -0.5
    assert PURE["length"](item(status="timeout"), config, "boxed") is None


def test_the_format_of_a_prompt_that_opens_the_tag():
    opened = problem(prompt="… <think>\n")
    text = "x</think><answer>4</answer>"
    assert PURE["format"](Item(opened, rollout(text), Verdict("correct", "4", "")), RewardConfig(), "tags") == 1.0
    assert PURE["format"](item(text), RewardConfig(), "tags") == 0.0


def test_tokens_count_for_overlong_and_repetition():
    # 19 of at most 20 tokens, the last fifth is 16..20: -(19 - 16) / 4 = -0.75.
    assert PURE["overlong"](item(tokens=19), RewardConfig(), "boxed") == pytest.approx(-0.75)
    repeated = item(completion_token_ids=[1] * 5)
    assert PURE["repetition"](repeated, RewardConfig(repetition_ngram=2), "boxed") == -3 / 4


def test_every_default_weight_is_a_component():
    check_names(RewardConfig())
    check_names(RewardConfig(weights=dict.fromkeys(BUILT_IN, 1.0)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"weights": {"verifer": 1.0}}, r"rewards\.weights\.verifer is no component \(did you mean verifier\?\)"),
        ({"weights": {}}, r"rewards\.weights is empty"),
        ({"functions": {"format": "a:b"}}, r"rewards\.functions\.format: that is the name of a built-in"),
        ({"functions": {"mine": "a.b"}}, r'rewards\.functions\.mine is \'a\.b\': expected "module:function"'),
        ({"functions": {"mine": "a:"}}, r'expected "module:function"'),
    ],
)
def test_a_wrong_name_is_one_clear_line(config, message):
    with pytest.raises(ValueError, match=message) as raised:
        check_names(RewardConfig(**config))
    assert "\n" not in str(raised.value)
