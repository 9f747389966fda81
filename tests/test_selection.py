"""The rules one by one: duplicates, near-duplicates, held-out split, caps, copies of benchmarks."""

import random

import numpy as np
import pytest

from data.near_duplicates import ERROR, band_shape, jaccard, shingles, signatures, similar_pairs
from data.selection import (
    cap_sources,
    drop_contaminated,
    drop_empty,
    drop_exact_duplicates,
    drop_near_duplicates,
    hold_out,
)
from data.text import problem_id
from pipeline.config import SourceConfig
from pipeline.config.data import DecontaminateConfig
from pipeline.types import Problem

STORY = "a farmer has 12 hens and each of them lays 5 eggs a week how many eggs is that in 3 weeks of summer"


def problem(text, answer="1", *, source="s", split="train", row="0", **fields):
    return Problem(
        problem_id=problem_id(text),
        problem=text,
        answer=answer,
        source=source,
        split=split,
        meta={"row": row},
        **fields,
    )


def test_problems_without_text_or_gold_leave():
    sifted = drop_empty([problem("1+1?"), problem(""), problem("2+2?", answer="")])
    assert [p.problem for p in sifted.kept] == ["1+1?"]
    assert [a.reason for a in sifted.set_aside] == ["problem text is empty", "gold answer is empty"]


def test_of_equal_texts_the_first_stays_and_other_golds_are_told():
    rows = [
        problem("1+1?", "2", row="a:1"),
        problem("1+1?", "2", row="a:2"),
        problem("1 +1?", "2"),
        problem("1+1?", "3"),
    ]
    sifted = drop_exact_duplicates(rows)
    assert sifted.kept == [rows[0], rows[2]]
    assert [a.reason for a in sifted.set_aside] == [
        "same text as s a:1",
        "same text as s a:1, whose gold is '2' instead of '3'",
    ]


def test_a_problem_of_two_benchmarks_counts_in_both():
    rows = [problem(STORY, source="gsm8k", split="heldout"), problem(STORY, source="mgsm", split="heldout")]
    sifted = drop_exact_duplicates([*rows, problem(STORY, source="train")])
    assert [(p.source, p.meta["also_in"]) for p in sifted.kept] == [("gsm8k", ["mgsm"])]


def test_a_near_duplicate_of_an_earlier_problem_leaves_with_its_evidence():
    rows = [problem(STORY, row="a:1"), problem(STORY.replace("farmer", "peasant"), row="a:2"), problem("other " * 9)]
    sifted = drop_near_duplicates(rows, 0.7)
    assert sifted.kept == [rows[0], rows[2]]
    (aside,) = sifted.set_aside
    # 24 words are 22 3-grams each; "farmer", the second word, stands in 2 of them: 20 shared of 22 + 22 - 20 = 24.
    assert aside.evidence["similarity"] == round(20 / 24, 4)
    assert aside.evidence["duplicate_of"] == rows[0].problem_id
    assert aside.reason == "83% of its word 3-grams are those of s a:1"


def test_other_numbers_are_another_problem():
    rows = [problem(STORY), problem(STORY.replace("12", "14"))]
    assert drop_near_duplicates(rows, 0.7).kept == rows


def test_held_out_problems_always_stay_and_count_as_earlier():
    twin = STORY.replace("farmer", "peasant")
    rows = [problem(STORY), problem(twin, split="heldout"), problem(STORY.replace("farmer", "nun"), split="heldout")]
    sifted = drop_near_duplicates(rows, 0.7)
    assert sifted.kept == rows[1:]


def test_near_duplicates_can_be_left_alone():
    rows = [problem(STORY), problem(STORY.replace("farmer", "peasant"))]
    assert drop_near_duplicates(rows, None).kept == rows


def test_a_chain_of_near_duplicates_keeps_what_is_not_near_its_head():
    words = [f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(40)]
    versions = []
    for step in range(5):
        words = [*words[: step * 8], *(f"x{chr(97 + step)}{chr(97 + i)}" for i in range(3)), *words[step * 8 + 3 :]]
        versions.append(problem(" ".join(words)))
    kept = drop_near_duplicates(versions, 0.6).kept
    assert versions[0] in kept and versions[1] not in kept
    for earlier in kept:
        for later in kept:
            if earlier is not later:
                assert jaccard(*shingles([earlier.problem, later.problem], 3)) < 0.6


def test_the_signature_estimates_the_jaccard_index():
    rng = random.Random(0)
    words = [f"w{i}" for i in range(400)]
    changed = list(words)
    for i in rng.sample(range(400), 20):
        changed[i] = f"y{i}"
    texts = [" ".join(words), " ".join(changed)]
    exact = jaccard(*shingles(texts, 3))
    first, second = signatures(texts, 3)
    # Standard deviation sqrt(j (1 - j) / 128) <= sqrt(0.25 / 128) = 0.0442.
    assert abs((first == second).mean() - exact) < 4 * ERROR


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_a_pair_at_the_threshold(threshold):
    bands, rows = band_shape(threshold)
    assert bands * rows <= 128
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


def test_pairs_include_every_two_of_equal_signatures_in_a_row():
    texts = [STORY, "something else entirely different here", STORY, STORY]
    pairs = similar_pairs(signatures(texts, 3), 0.9, 0.9)
    assert pairs == [(0, 2), (0, 3), (2, 3)]
    assert similar_pairs(signatures(["", "", "!"], 3), 0.9, 0.9) == []
    assert similar_pairs(np.empty((0, 128), np.uint32), 0.9, 0.9) == []


def test_pairs_that_share_a_band_but_little_else_are_left_out():
    one, other = np.arange(128, dtype=np.uint32), np.arange(1000, 1128, dtype=np.uint32)
    other[:64] = one[:64]
    assert similar_pairs(np.stack([one, other]), 0.8, 0.5) == [(0, 1)]
    assert similar_pairs(np.stack([one, other]), 0.8, 0.51) == []


def test_hold_out_is_by_text_and_moves_nobody_else():
    rows = [problem(f"{i}?") for i in range(2000)]
    split = {p.problem_id: p.split for p in hold_out(rows, 0.1, seed=0)}
    held = sum(value == "heldout" for value in split.values())
    # Binomial(2000, 0.1): 200 with a standard deviation of 13.4; four of them.
    assert abs(held - 200) < 54
    fewer = {p.problem_id: p.split for p in hold_out(rows[::3], 0.1, seed=0)}
    assert all(split[id_] == value for id_, value in fewer.items())
    assert {p.problem_id: p.split for p in hold_out(rows, 0.1, seed=1)} != split


def test_a_source_with_its_own_split_keeps_it():
    rows = [problem(f"{i}?", split="heldout" if i < 3 else "train") for i in range(200)]
    assert hold_out(rows, 0.5, seed=0) == rows


def test_a_cap_keeps_the_same_problems_whatever_else_is_there():
    sources = [("s", SourceConfig(cap=10)), ("t", SourceConfig())]
    rows = [problem(f"{i}?") for i in range(50)] + [problem(f"t{i}?", source="t") for i in range(20)]
    sifted = cap_sources(rows, sources, seed=0)
    kept = [p for p in sifted.kept if p.source == "s"]
    assert (len(kept), len(sifted.kept), len(sifted.set_aside)) == (10, 30, 40)
    assert [p for p in cap_sources(rows[::-1], sources, seed=0).kept[::-1] if p.source == "s"] == kept


def test_a_training_problem_whose_solution_repeats_a_benchmark_leaves_and_order_stays():
    solution = "First 12 times 5 is 60 eggs in a week, and then 60 times 3 is 180 eggs in all the three weeks."
    rows = [
        problem("unrelated question number one?", row="t:1"),
        problem(STORY, source="bench", split="heldout", row="b:9", solution=solution),
        problem("A puzzle with hens?", row="t:2", solution=f"See: {solution}"),
        problem("unrelated question number two?", row="t:3"),
    ]
    sifted = drop_contaminated(rows, DecontaminateConfig())
    assert sifted.kept == [rows[0], rows[1], rows[3]]
    (aside,) = sifted.set_aside
    assert aside.reason == "containment: repeats 100% of the solution of bench b:9"
    assert aside.evidence["passage"].startswith("A puzzle with hens")
    assert drop_contaminated(rows, DecontaminateConfig(rule="off")).kept == rows
