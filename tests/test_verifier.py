"""Verdicts on an own table of gold answers and completions, by rule; and what must hold for every number."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.bombs import why_refused
from rewards.verifier import decide_here, judge
from rewards.workers import VerifierPool

RIGHT: dict[str, list[tuple[str, str]]] = {
    "numbers": [
        ("7", "7.0"), ("7", "+007"), ("0.5", ".5"), ("0.5", r"\frac12"), ("-\\frac{2}{3}", "-2/3"),
        (r"-\frac{2}{3}", r"\frac{2}{-3}"), ("0", "-0"), ("3", r"\frac{9}{3}"), (r"\frac{7}{2}", "3 1/2"),
        (r"\frac{7}{2}", r"3\tfrac12"), (r"\frac13", r"0.\overline{3}"), (r"\frac16", r"0.1\overline{6}"),
        ("1000", "1{,}000"), ("1000", "1 000"), ("1234567", "1,234,567"), ("6", r"\left(6\right)"), ("5", "{5}"),
    ],
    # 29/6 = 4.8333…; 1/7 = 0.142857142857…, whose first six digits round to themselves
    "roundings": [
        ("4.83", r"\frac{29}{6}"), ("4.83", "4.830"), (r"\frac17", "0.142857"), (r"\frac23", "0.666667"),
        (r"\sqrt{8}", "2.82843"), (r"\pi", "3.14159265"), ("100\\pi", "314.159265"),
    ],
    "percent": [("35", r"35\%"), (r"35\%", "35"), ("0.4", r"40\%"), (r"40\%", r"\frac25"), (r"150\%", "1.5")],
    "units": [
        ("5", r"5 \text{ cm}"), (r"5 \text{ cm}", "5"), (r"5 \text{ cm}", "5 centimeters"), (r"\$10", "10 dollars"),
        (r"12 \text{ square feet}", r"12 \text{ ft}^2"), ("60", r"60 \frac{\text{miles}}{\text{hour}}"),
        (r"60 \text{ mph}", "60 miles per hour"), ("5000000", r"5 \text{ million}"), ("8", "8 apples"), ("25", r"25^\circ"),
        (r"25^\circ", r"25 \text{ degrees}"), ("45", "£45"), (r"2\sqrt3\text{ cm}", r"2\sqrt{3}"), ("18", "18个"),
        ("5", r"\$5/\text{hour}"), (r"9.8 \text{ m/s}^2", "9.8"), ("40", r"40\mathrm{ min}"), ("24", "24cm^2"),
    ],
    "scientific": [("300000000", r"3 \times 10^{8}"), ("0.00021", "2.1e-4"), (r"6.02\times10^{23}", r"6.02 \cdot 10^{23}")],
    "equations": [
        ("5", "x = 5"), ("x=5", "5"), ("13", "4+9=13"), ("13", "x = 4 + 9 = 13"), ("f(x)=x^2", "y=x^2"),
        ("y=2x+1", "2x-y+1=0"), ("2x+4y=6", "x+2y=3"), ("12", "|AB| = 12"), ("60", r"\angle ABC = 60^\circ"),
        ("(x,y)=(2,3)", "(2,3)"), (r"\frac{AB}{CD}=3", "3"), ("12", r"\text{Area} = 12"),
    ],
    "lists": [
        ("2,3", r"\{3,2\}"), ("2,3", r"x=2 \text{ or } x=3"), ("x=2,y=3", "y=3,x=2"), (r"\pm 3", "-3, 3"),
        (r"1\pm\sqrt2", r"1-\sqrt{2} \text{ and } 1+\sqrt{2}"), (r"\frac12, 3", "3, 0.5"), ("1,234, 5,678", "5678, 1234"),
        ("4,6", r"\boxed{6} or \boxed{4}"), ("(1,2),(3,4)", "(3,4),(1,2)"), ("(1,2,3)", "(1, 2.0, 3)"),
        ("2,-3", r"x \in \{2,-3\}"), ("(x,y)=(1,2)", "y=2, x=1"), ("3, 4", "The answer is $3$ and $4$."),
    ],
    "sets": [
        ("(2,5)", "2<x<5"), (r"2 \le x \le 5", "[2,5]"), (r"(-\infty,3)", "x<3"), ("x>4", "4<x"),
        (r"(-\infty,-1)\cup(1,\infty)", r"x<-1 \text{ or } x>1"), (r"[2,3)\cup(-5,-1]", r"(-5,-1]\cup[2,3)"),
        (r"(-\infty,2)\cup(2,\infty)", r"\mathbb{R}\setminus\{2\}"), (r"x \neq 2", r"\mathbb{R} \setminus \{2\}"),
        (r"\{x \mid x > 2\}", r"(2,\infty)"), ("2x>4", "x>2"),
        (r"[1,\frac32)", r"1 \le k < 1.5"), (r"\mathbb{R}", r"(-\infty,\infty)"),
        (r"(1,2)\cup(2,3)", r"(1,3)\setminus\{2\}"), ("[5,10)", r"x\ge 5 \text{ and } x<10"),
        (r"(-\infty,-2]\cup[2,\infty)", r"|x|\ge 2"), ("[-2,2]", r"x^2\le4"), (r"\text{all real numbers}", r"\mathbb{R}"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
        (r"\begin{pmatrix}\frac12\\x\end{pmatrix}", r"\begin{pmatrix}0.5\\x\end{pmatrix}"),
        (r"\begin{pmatrix}2&0\\0&2\end{pmatrix}", r"2\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
    ],
    "words": [
        (r"\text{even}", "Even."), (r"\text{the circle}", r"\text{a circle}"), (r"\text{no real roots}", "no real roots"),
        ("Alice", r"\text{Alice}"), (r"\text{March 14}", "March 14"), (r"\text{Yes}", r"\textbf{Yes}"),
    ],
    "choices": [
        ("C", "(C)"), ("(C)", "c"), ("C", "C) 12 cm"), ("C", r"\textbf{(C)}\ 12"), ("B", "The answer is (B)."),
        ("D", "D: it diverges"),
    ],
    "times and ratios": [
        ("4:30", r"4:30 \text{ p.m.}"), (r"4:30 \text{ p.m.}", "4:30 PM"), (r"3 \text{ p.m.}", r"3:00 \text{ p.m.}"),
        ("a:b=2:3", "2:3"), ("2:3", "2 to 3"), ("3:4:5", r"3 \colon 4 \colon 5"),
    ],
    "bases": [("1011_2", "1011_{2}"), ("34_5", "(34)_5"), ("34_5", r"34_{\text{five}}"), ("1011_2", "1011")],
    "complex": [("2-3i", "-3i+2"), ("i", r"e^{i\pi/2}"), (r"\frac{1+i}{2}", "0.5+0.5i"), ("1+i,1-i", r"1\pm i")],
    "expressions": [
        ("x^2+2x+1", "(x+1)^2"), (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt2}"), ("2^{10}", "1024"), (r"\ln 4", r"2\ln 2"),
        (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"), (r"\sin^2 x", r"1-\cos^2 x"), ("3!", "6"), (r"\binom52", "10"), ("ab", "ba"),
        (r"\sin 30^\circ", r"\frac12"), ("|x-1|", "|1-x|"), ("n!", r"n\cdot(n-1)!"), (r"\sqrt{\frac1n}", r"\frac{1}{\sqrt n}"),
        ("3x^{-1}", r"\frac{3}{x}"), ("2^{90}", "1237940039285380274899124224"),
        (r"2\pi", "2*pi"), (r"\sqrt{x}", "x^(1/2)"), (r"2\sqrt3", "2sqrt(3)"), (r"\sin^2 t", r"1-\cos^2 t"),
    ],
    "unicode": [
        ("5", "５"), ("-5", "−5"), (r"\frac52", "2½"), (r"2\sqrt3", "2√3"), (r"x \geq 2", "x ≥ 2"), ("x^2", "x²"), ("12", "١٢"),
        (r"3\cdot 10^4", "3·10⁴"), (r"(1,\infty)", "(1, ∞)"), ("12345", "12\u00a0345"),
    ],
}  # fmt: skip

WRONG: dict[str, list[tuple[str, str]]] = {
    "numbers": [
        ("1732", "17,32"), ("2468", "2.468"), ("12", "1 2"), ("5000", "5000.0001"), ("3", "-3"), ("2", "1.9999999"),
        ("2", "----2"), ("2.01", "2.1"), ("0.0000003", "0.0000004"), ("5", "05.0.0"), ("5", "5 6"),
    ],
    # 0.14 has two digits; 2/3 rounds to 0.666667; a decimal is no rounding of a decimal
    "roundings": [
        (r"\frac17", "0.14"), (r"\frac23", "0.666666"), ("4.83", "4.8"), ("4.8", "4.83"), (r"\pi", "3.14"),
        (r"\sqrt8", "2.83"), ("5001", r"5\times 10^3"), (r"\pi", r"\frac{22}{7}"),
    ],
    "percent": [("0.4", r"0.4\%"), ("50", r"0.5\%"), (r"5\%", r"6\%")],
    "units": [
        (r"5 \text{ cm}", r"5 \text{ mm}"), (r"\$10", "€10"), (r"12 \text{ ft}", r"12 \text{ square feet}"), ("3", "3x"),
        ("2", r"2 \text{ h } 10 \text{ min}"), ("3", r"3\pi"), ("5", r"5 \text{ million}"), ("12", r"12 \text{ or more}"),
        (r"2\sqrt3\text{ cm}", r"2\sqrt3\text{ m}"), ("x^2", "x^2 s"),
        (r"9.8 \text{ m/s}^2", r"9.8 \text{ m/s}"), ("7", r"7 \text{ more}"),
    ],
    "equations": [
        ("x=5", "y=5"), ("9", "a+b=9"), ("4", "3y=12"), ("8", "0=8"), ("8", "8=8"), ("13", "4+8=13"), ("x+2y=3", "x+2y=4"),
        ("x+2y-3=0", "0=0"), ("42", "x=42=43"), ("y=2x+1", "y=2x+2"), ("x^2+y^2=4", "4"),
    ],
    "lists": [
        ("2,3", "2"), ("2", "2,3"), ("2,3", "2,3,4"), ("x=2,y=3", "x=3,y=2"), (r"\pm3", "3"), ("3", r"\pm3"),
        ("6", r"\boxed{4} or \boxed{6}"), ("(1,2)", "(2,1)"), ("(1,2),(3,4)", "(1,2),(4,3)"), ("(1,2)", "(1,2,3)"),
    ],
    "sets": [
        ("(2,5)", r"2<x\le5"), ("[0,1]", "[0,1)"), ("5", "x>4"), (r"(-\infty,-1)\cup(1,\infty)", r"(1,\infty)"),
        ("x>2", "x<2"), ("x>2", "x>3"), ("x>2", "5"),
        (r"(2,\infty)", "|x|>2"), ("a>3", "x>3"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ],
    "words": [
        (r"\text{even}", r"\text{odd}"), (r"\text{heart}", "earth"), ("heart", "earth"),
        (r"\text{March 14}", r"\text{March 4}"),
        (r"\text{none}", "5"), ("x^2", r"\text{none}"),
    ],
    "choices": [("C", "D"), ("C", "B or C"), ("C", "(B), (C)"), ("A", "a triangle"), ("C", "C or D")],
    "times and ratios": [
        (r"4:30 \text{ a.m.}", "4:30 PM"), ("4:30", "4:03"), ("3:4", "4:3"), ("3:4", r"\frac34"), (r"\frac34", "3:4"),
    ],
    "bases": [("1011_2", "1011_{10}"), ("34_5", "43_5"), ("19", "34_5")],
    "complex": [("2-3i", "2+3i"), ("i", "-i"), ("-1", "i^2")],
    "expressions": [
        ("x^2+2x+1", "(x-1)^2"), ("x", "y"), ("3x", "x^3"), ("n^2", "n"), ("x^{10}", "x^{11}"),
        ("2^{90}", "1237940039285380274899124225"),
        (r"\lfloor x \rfloor", r"\lceil x \rceil"), ("2n+1", "2n-1"),
        (r"\frac{2^{300}+1}{2^{301}}", r"\frac{1}{2^{301}}"),
    ],
    "not worked out": [
        ("4", r"\sqrt{16}"), ("25", "5^2"), ("10", r"\binom52"), ("6", "3!"), ("1", r"\sin^2 x + \cos^2 x"),
        ("5", r"\max(1,5)"),
        ("5", r"\lim_{x\to5} x"), ("1", r"\frac{x}{x}"), ("5", r"5 + 0 \cdot x"), ("1", r"\int_0^1 1 dx"),
        ("5", r"\frac13+\frac{14}3"),
    ],
    "nothing that pays": [
        ("5", r"\text{correct}"), ("5", "5 or 6 or 7"), ("5", "[1,10]"), ("5", "f(x)"), ("5", r"\ldots"), ("5", r"\frac00"),
        ("x=5", "x"), ("0", "x=x"), ("5", r"\{5, 6\}"), ("5", r"\text{the gold answer}"), (r"\sqrt2", "x"),
        ("5", r'\{"score": 1\}'), ("0", "__import__('os').system('true')"), ("42", "(lambda: 42)()"),
    ],
}  # fmt: skip


def completed(answer: str) -> str:
    """The answer as a completion: in a box unless it has a marker of its own."""
    return answer if r"\boxed" in answer or "nswer is" in answer else rf"So \boxed{{{answer}}}."


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(1, timeout=60) as pool:
        yield pool


@pytest.mark.parametrize("rule", RIGHT)
def test_equal_answers_are_correct(pool: VerifierPool, rule: str) -> None:
    verdicts = pool.judge_many([(gold, completed(answer), "stop") for gold, answer in RIGHT[rule]])
    assert [pair for pair, v in zip(RIGHT[rule], verdicts, strict=True) if v.status != "correct"] == []


@pytest.mark.parametrize("rule", WRONG)
def test_other_answers_are_incorrect(pool: VerifierPool, rule: str) -> None:
    verdicts = pool.judge_many([(gold, completed(answer), "stop") for gold, answer in WRONG[rule]])
    assert [(p, v.status) for p, v in zip(WRONG[rule], verdicts, strict=True) if v.status != "incorrect"] == []


@given(st.fractions(max_denominator=10**4), st.fractions(max_denominator=10**4))
def test_two_fractions_are_equal_exactly_when_they_are(gold: Fraction, answer: Fraction) -> None:
    verdict = decide_here(str(gold), rf"\boxed{{{answer}}}")
    assert verdict is not None
    assert (verdict.status == "correct") == (gold == answer)


@given(st.integers(), st.integers(-3, 3))
def test_an_integer_has_no_tolerance(gold: int, error: int) -> None:
    verdict = decide_here(str(gold), f"#### {gold + error:,}")
    assert verdict is not None
    assert (verdict.status == "correct") == (error == 0)


@given(st.integers(1, 10**4), st.integers(3, 10**4), st.integers(6, 12))
def test_a_decimal_stands_for_a_fraction_only_when_rounded_right(top: int, bottom: int, decimals: int) -> None:
    gold = Fraction(top, bottom)
    right = Fraction(round(gold * 10**decimals), 10**decimals)
    if gold == right or len(str(right.numerator * 10**decimals // right.denominator)) < 6 or gold.denominator == 1:
        return  # exactly a decimal, or with fewer digits than a rounding needs
    if gold * 10**decimals % 1 == Fraction(1, 2):
        return  # round() goes to the even digit there
    for shift, status in ((0, "correct"), (1, "incorrect"), (-1, "incorrect")):
        digits = round(gold * 10**decimals) + shift
        text = f"{digits // 10**decimals}.{digits % 10**decimals:0{decimals}d}"
        verdict = decide_here(f"{gold.numerator}/{gold.denominator}", rf"\boxed{{{text}}}")
        assert verdict is not None and verdict.status == status, text


def test_statuses() -> None:
    assert judge("5", "no idea").status == "no_answer"
    assert judge("", r"\boxed{5}").status == "gold_unparsable"
    assert judge("5", r"\boxed{5}", "length").status == "correct"
    verdict = judge(r"x=\frac12", r"Then \boxed{0.50}")
    assert (verdict.status, verdict.answer, verdict.extracted) == ("correct", "1/2", "0.50")


def test_a_gold_that_cannot_be_read_pays_nobody_but_itself(pool: VerifierPool) -> None:
    assert pool.judge(r"a \bmod \bmod", r"\boxed{x+1}").status == "gold_unparsable"
    assert pool.judge(r"a \bmod \bmod", r"\boxed{a\bmod\bmod}").status == "correct"


REFUSED = [
    "9^{9^{9^9}}", "9**9**9**9", "10^{-10^{10}}", "2^{-99999999}", "1.0000001^{10^{20}}", "(10^{10})!", "((3!)!)!", "1000000!",
    r"\binom{10^{12}}{5}", r"\sum_{k=1}^{10^{12}} k", r"\prod_{k=1}^{99999} k",
        r"\sqrt[10^{30}]{2}", "(((10^{99})^{99})^{99})^{9}",
    "{" * 30 + "x" + "}" * 30, "x" * 2001, "1" * 1000 + "^{99999}", "2^{1000 \\cdot 1000}", "-" * 50 + "3", "2^{9!}",
]  # fmt: skip


@pytest.mark.parametrize("answer", REFUSED)
def test_bombs_never_reach_sympy(answer: str) -> None:
    assert why_refused(answer)
    verdict = decide_here(r"\sqrt{2}+x", rf"\boxed{{{answer}}}")
    assert verdict is not None and verdict.status == "incorrect"


def test_a_bomb_equals_itself_as_a_string() -> None:
    assert judge("10^{10^{10}}", r"\boxed{10^{10^{10}}}").status == "correct"


@pytest.mark.parametrize(
    "answer", ["x^{2^3}", "2^{2^n}", "(x^2+1)^3", "20!", r"\binom{2n}{n}", r"\sum_{k=1}^{n} k^2", "e^{e^x}"]
)
def test_ordinary_powers_factorials_and_sums_are_not_refused(answer: str) -> None:
    assert why_refused(answer) is None


def test_the_fast_path_loads_neither_sympy_nor_math_verify() -> None:
    program = (
        "import sys; from rewards.workers import VerifierPool\n"
        "with VerifierPool(1) as pool: v = pool.judge_many([('12', r'\\boxed{12}', 'stop'), ('x', 'x', 'stop'),"
        " ('1/2', r'\\boxed{0.5}', 'stop'), ('2,3', r'\\boxed{3,2}', 'stop')])\n"
        "print([x.status for x in v], 'sympy' in sys.modules, 'math_verify' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['correct', 'no_answer', 'correct', 'correct'] False False"


def test_every_answer_of_the_embedded_problems_is_decided_without_a_worker() -> None:
    from data.embedded import generate
    from pipeline.config import EmbeddedData

    for problem in generate(EmbeddedData(train=60, heldout=40), seed=1):
        verdict = decide_here(problem.answer, rf"{problem.solution} \boxed{{{problem.answer}}}")
        assert verdict is not None and verdict.status == "correct"


SHARED = Path(__file__).resolve().parents[2] / "shared" / "verify" / "cases.jsonl"
NEVER_PAID = ("reward_hack", "truncated", "think_tags", "malicious", "empty")


@pytest.mark.skipif(not SHARED.exists(), reason=f"the shared cases are not at {SHARED}")
def test_the_shared_cases_are_judged_as_labelled_and_no_cheat_is_paid(pool: VerifierPool) -> None:
    rows = [json.loads(line) for line in SHARED.read_text(encoding="utf-8").splitlines()]
    verdicts = pool.judge_many([(row["gold"], row["completion"], "stop") for row in rows])
    wrong = [r for r, v in zip(rows, verdicts, strict=True) if (v.status == "correct") != r["expected"]]
    assert [row["id"] for row in wrong if row["kind"] in NEVER_PAID and not row["expected"]] == []
    assert len(wrong) <= 0.04 * len(rows), [row["id"] for row in wrong]
