"""Rewards by rule: form, length, repetition, language. Garbage earns nothing."""

import pytest

from rewards.functions import (
    format_reward,
    language_consistency,
    length_reward,
    overlong_penalty,
    repetition_penalty,
)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>2 and 2</think>\n<answer>4</answer>", False, 1.0),
        ("  <think>x</think> <answer>4</answer>\n", False, 1.0),
        ("2 and 2</think><answer>4</answer>", True, 1.0),
        ("2 and 2</think><answer>4</answer>", False, 0.0),  # the prompt did not open the tag
        ("<think>x</think><answer>4</answer>", True, 0.0),  # opened twice
        ("<think></think><answer>4</answer>", False, 0.0),
        ("<think>x</think><answer>  </answer>", False, 0.0),
        ("<think>x</think>so <answer>4</answer>", False, 0.0),
        ("Sure! <think>x</think><answer>4</answer>", False, 0.0),
        ("<think>x</think><answer>4</answer> done", False, 0.0),
        ("<answer>4</answer><think>x</think>", False, 0.0),
        ("<think>x<think>y</think></think><answer>4</answer>", False, 0.0),
        ("<think>x</think><answer>4</answer><answer>5</answer>", False, 0.0),
        ("<think>x</think><answer>4", False, 0.0),
        ("<think><answer>4</answer></think>", False, 0.0),
        ("", False, 0.0),
        ("</answer></think><think><answer>", False, 0.0),
        ("</think></think><answer><answer>", True, 0.0),
    ],
)
def test_tags_once_each_in_order_and_nothing_else(text, opened, expected):
    assert format_reward(text, "tags", finish_reason="stop", opened=opened) == expected


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("So it is \\boxed{4}.", False, 1.0),
        ("\\boxed{\\frac{1}{2}}", False, 1.0),
        ("\\boxed{\\{1, 2\\}}", False, 1.0),
        ("\\boxed {4}", False, 1.0),
        ("<think>x</think> \\boxed{4}", False, 1.0),
        ("x</think> \\boxed{4}", True, 1.0),
        ("<think>\\boxed{4}</think> four", False, 0.0),
        ("<think>\\boxed{4}</think> \\boxed{4}", False, 0.0),
        ("<think>\\boxed{4}", False, 0.0),
        ("\\boxed{4} \\boxed{5}", False, 0.0),
        ("\\boxed{4", False, 0.0),
        ("\\boxed{ }", False, 0.0),
        ("\\boxed4", False, 0.0),
        ("\\boxed", False, 0.0),
        ("4", False, 0.0),
        ("", False, 0.0),
        ("\\boxed{" * 50, False, 0.0),
    ],
)
def test_exactly_one_closed_box_after_the_reasoning(text, opened, expected):
    assert format_reward(text, "boxed", finish_reason="stop", opened=opened) == expected


@pytest.mark.parametrize(("text", "form"), [("\\boxed{4}", "boxed"), ("<think>x</think><answer>4</answer>", "tags")])
def test_a_truncated_completion_earns_no_format_reward(text, form):
    assert format_reward(text, form, finish_reason="length") == 0.0


def test_the_overlong_penalty_grows_over_the_last_share():
    # 100 tokens at most, the last fifth is 80..100: at 90 it is -(90 - 80) / 20 = -0.5.
    assert [overlong_penalty(n, 100, 0.2) for n in (0, 80, 90, 100, 120)] == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_the_length_reward_moves_between_its_ends():
    # Half a cosine at a quarter: 0.5 (1 - cos(pi / 4)) = 0.14645; from 1 to 0 that leaves 0.85355.
    assert length_reward(25, 100, (1.0, 0.0), "cosine") == pytest.approx(0.85355, abs=1e-5)
    assert length_reward(25, 100, (1.0, 0.0), "linear") == 0.75
    assert length_reward(25, 100, (-10.0, 0.0), "linear") == -7.5
    assert length_reward(0, 100, (-10.0, 0.0), "cosine") == -10.0
    assert length_reward(150, 100, (1.0, -2.0), "cosine") == pytest.approx(-2.0)


def test_repetition_counts_ngrams_that_occurred_before():
    # 1 2 1 2 1: bigrams 12 21 12 21, two of the four are repeats.
    assert repetition_penalty([1, 2, 1, 2, 1], 2) == -0.5
    assert repetition_penalty([1, 2, 3, 4], 2) == 0.0
    # eight bigrams, all the same: seven repeats.
    assert repetition_penalty([7] * 9, 2) == -7 / 8
    assert repetition_penalty([7, 7], 2) == 0.0
    assert repetition_penalty([], 10) == 0.0


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("There are four apples", "en", 1.0),
        ("there are 四个 apples", "en", 3 / 5),  # three words and two Chinese letters
        ("there are 四个 apples", "zh", 2 / 5),
        ("设 $x$ 为 \\frac{1}{2}", "zh", 1.0),  # a variable and a command are no words
        ("x + y = 2", "en", 0.0),  # no word at all
        ("", "en", 0.0),
        ("Пусть x равно two", "ru", 2 / 3),
        ("カタカナ と 漢字", "ja", 1.0),
        ("see https://example.org/page", "en", 1.0),
        ("<think>привет</think>", "en", 0.0),
    ],
)
def test_language_is_the_share_of_words_in_its_script(text, language, expected):
    assert language_consistency(text, language) == pytest.approx(expected)


def test_auto_takes_the_language_of_the_problem():
    assert language_consistency("答案是四", "auto", "二加二等于几") == 1.0
    assert language_consistency("the answer is four", "auto", "二加二等于几") == 0.0
    assert language_consistency("漢字", "auto", "これはなんですか") == 1.0
    with pytest.raises(ValueError, match=r"rewards\.language"):
        language_consistency("four", "auto", "2 + 2 = ?")
