"""Extraction of the stated answer, its cleaned spelling, and the classes in which answers vote."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.answers import canonical, clean, extract, extract_answer
from rewards.literals import parse_literal

EXTRACTED = [
    # the last box, braces balanced
    (r"First \boxed{3}, then \boxed{8}.", "8"),
    (r"So $\boxed{\frac{5}{6}}$ it is.", r"\frac{5}{6}"),
    (r"The set \boxed{\{4,5\}} fits.", r"\{4,5\}"),
    (r"\boxed{\text{a } \boxed{6}}", "6"),
    (r"\fbox{11}", "11"),
    ("\\boxed\n {11}", "11"),
    (r"$\boxed 7$", "7"),
    (r"$\boxed\pi$", r"\pi"),
    (r"\boxed{9}} and on", "9"),
    (r"\boxed{12} is certainly right, for 13 is odd", "12"),
    # a last box that says nothing hides all before it
    (r"\boxed{7} and now \boxed{", None),
    (r"\boxed{7} and now \boxed{}", None),
    (r"\boxed{ ? }", None),
    (r"\boxed{\frac{1}{2}", None),
    (r"$\boxed$", None),
    # boxes side by side are one list
    (r"\boxed{2} and \boxed{3}", "2, 3"),
    (r"$\boxed{2}$, $\boxed{3}$ or $\boxed{5}$", "2, 3, 5"),
    (r"\boxed{2} \text{ or } \boxed{3}", "2, 3"),
    (r"\boxed{0.5}, \boxed{\frac12}", "0.5"),
    (r"\boxed{2} apples, so \boxed{3} pears", "3"),
    # reasoning and answer tags
    (r"<think>\boxed{1}</think>", None),
    (r"<think>\boxed{1}", None),
    (r"<think>\boxed{1}</think> \boxed{2}", "2"),
    (r"\boxed{1}</think> \boxed{2} <think> \boxed{3}", None),
    ("<think>hm</think><answer>31</answer>", "31"),
    ("<answer>30</answer> wait <answer> 31 </answer>", "31"),
    (r"<answer>30</answer> but \boxed{31}", "30"),
    ("<answer></answer>", None),
    ("<answer>31", None),
    (r"<answer>\boxed{31}</answer>", "31"),
    (r"\boxed{31<|im_end|>}", "31"),
    # the #### line
    ("6 x 7\n#### 42", "42"),
    ("#### 41\nNo.\n####42", "42"),
    ("#### Answer\nThe answer is 4.", "4"),
    # phrases, up to the end of the sentence
    ("The answer is 4.", "4"),
    ("The answer is 4.5. I am sure.", "4.5"),
    ("The answers are 4 and 5.", "4 and 5"),
    ("So the answer is therefore **4**.", "4"),
    ("**Answer:** $x = 4$", "x = 4"),
    (r"Final answer: \(\frac{1}{3}\). Done.", r"\frac{1}{3}"),
    ("Final Answer: the largest such $m$ is 15.", "15"),
    ("The answer is $3$ and $4$.", "$3$ and $4$"),
    ("The answer is 19 (not 20).", "19"),
    ("The answer is the cost = 12", "12"),
    ("The answer is 9:45 a.m. on Monday", "9:45 a.m. on Monday"),
    ("所以答案是 8。", "8"),
    ("最终答案：8", "8"),
    ("Answer:\n8", "8"),
    ("First the answer is 3, then the answer is 4.", "4"),
    # the last line of GSM8K's GPT-3 solutions, but no option of a list
    ("3 + 4 = 7\nA: 7", "7"),
    ("A: 7\nB: 8", None),
    # never the last number
    ("We get 5, then 6, then 7", None),
    ("Wait, 12. Wait, 12. Wait, 12.", None),
    ("", None),
]


@pytest.mark.parametrize(("completion", "answer"), EXTRACTED)
def test_extract_answer(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


def test_a_completion_cut_off_by_length_needs_a_complete_box() -> None:
    assert extract_answer("The answer is 4. And", "length") is None
    assert extract_answer("#### 4", "length") is None
    assert extract_answer(r"\boxed{4} And", "length") == "4"


def test_extraction_says_why_there_is_no_answer() -> None:
    assert extract(r"\boxed{4} \boxed{").rule == "the last box is empty or not closed"
    assert extract("<think>4").rule == "the reasoning is not closed"
    assert extract("4").rule == "no box, #### line or answer phrase"


CLEANED = [
    (r"\dfrac12", r"\frac{1}{2}"),
    (r"\tfrac1{72}", r"\frac{1}{72}"),
    (r"{a \over b}", r"\frac{a }{ b}"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"\left( 1,\; 2 \right)", "( 1, 2 )"),
    (r"\$5.", r"\$5"),
    (r"$x^{2}$", "x^2"),
    (r"12{,}345", "12345"),
    (r"12\,345", "12345"),
    (r"12,\!345", "12345"),
    (r"1,\,2", "1, 2"),
    (r"\mathrm{e}^{\mathrm{i}}", "e ^i"),
    (r"\mathbf{5}", "5"),
    (r"x \geqslant 1", r"x \ge 1"),
    ("x²", "x^2"),
    ("√2", r"\sqrt{2}"),
    ("2½", r"2\frac{1}{2}"),
    ("−3", "-3"),
    ("１２", "12"),
    ("1\u200b2", "12"),
    ("1\u202f234", "1234"),
    (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{pmatrix}1\\ 2\end{pmatrix}"),
    ("{{7}}", "7"),
]


@pytest.mark.parametrize(("written", "cleaned"), CLEANED)
def test_clean(written: str, cleaned: str) -> None:
    assert clean(written) == cleaned


CLASSES = [
    ["1/2", "0.5", "0.50", r"\frac12", r"\dfrac{2}{4}", r"50\%", "x = 0.5", "½", ".5", r"\boldsymbol{0.5}"],
    ["1234", "1,234", r"1{,}234", "1234.0", "1234 apples", r"\$1,234", r"1.234 \times 10^3"],
    ["2, 3", r"\{3, 2\}", "2 and 3", "x = 3 or x = 2"],
    ["2 < x < 5", "(2, 5)", r"x \in (2, 5)", "5 > x > 2"],
    ["(C)", "C", r"\text{C}"],
    [r"\text{An ellipse}", "ellipse"],
    [r"\pm 4", "4, -4"],
    ["x=1, y=2", "y = 2, x = 1"],
    ["x=2, y=1"],
    ["(1, 2)"],
    ["[1, 2]"],
    ["x^2 + 1", "x^2+1", "f(x) = x^2+1"],
]


def test_equal_answers_vote_together_and_different_ones_apart() -> None:
    forms = [{canonical(answer) for answer in group} for group in CLASSES]
    assert [len(group) for group in forms] == [1] * len(CLASSES)
    assert len(set.union(*forms)) == len(CLASSES)


@given(st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=999))
def test_a_fraction_has_one_canonical_form_however_written(value: Fraction) -> None:
    top, bottom = value.numerator, value.denominator
    spellings = [f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{3 * top}}}{{{3 * bottom}}}"]
    if bottom == 1:
        spellings += [f"{top:,}", f"{top}.00", f"x = {top}", rf"{top}\text{{ cm}}"]
    assert {canonical(text) for text in spellings} == {str(value)}


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=4))
def test_a_decimal_literal_is_exact(value) -> None:
    number = parse_literal(str(value))
    assert number is not None and number.value == Fraction(value)


@settings(max_examples=300)
@given(st.text(alphabet=r"\{}()[]frac boxed12x,=.<>^_$%½√…答案is#", max_size=80))
def test_no_text_breaks_extraction_or_canonical_form(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or answer.strip()
    assert canonical(canonical(text)) == canonical(canonical(canonical(text)))


def test_a_number_too_large_to_write_out_still_has_a_form() -> None:
    assert canonical("1e9999") == "1e9999"
    assert canonical("7" * 5000) == "7" * 2000
