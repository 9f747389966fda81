"""Words and n-gram hashes: normalisation, batches, and their limits."""

import numpy as np
import pytest

from data.alignment import align, common_subsequence, densest_window
from data.words import in_batches, split_words, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Let's FIND it: 3.5!", ["let", "s", "find", "it", "3", "5"]),
        (r"$\frac{1}{2}x^2$", ["frac", "1", "2", "x", "2"]),
        ("x² is ½", ["x2", "is", "1", "2"]),  # NFKC: ² is 2, ½ is 1⁄2
        ("Müller’s naïve café", ["müller", "s", "naïve", "café"]),
        ("小明有3个苹果", ["小", "明", "有", "3", "个", "苹", "果"]),
        ("রজারের ৫টি বল", ["রজারের", "৫টি", "বল"]),  # vowel signs are part of the word
        ("한국어 문제", ["한국어", "문제"]),
        ("", []),
        ("\x00 \ud800 a\x00b", ["a", "b"]),
    ],
)
def test_words_are_runs_of_letters_and_digits_in_lower_case(text, words):
    assert words_of(text) == words


def test_equal_words_have_equal_hashes_wherever_they_stand():
    texts = ["the cat sat", "on The CAT", "catsat the"]
    words = split_words(texts)
    by_text = {(int(d), i): h for i, (d, h) in enumerate(zip(words.documents, words.hashes, strict=True))}
    the_cat_sat, on_the_cat, catsat_the = (
        [by_text[d, i] for i in range(len(words.hashes)) if (d, i) in by_text] for d in range(3)
    )
    assert the_cat_sat[0] == on_the_cat[1] == catsat_the[1]
    assert the_cat_sat[1] == on_the_cat[2]
    assert len({*the_cat_sat, *on_the_cat, *catsat_the}) == 5  # the, cat, sat, on, catsat


def test_grams_do_not_cross_from_one_text_into_the_next():
    words = split_words(["a b c", "d", "", "e f"])
    _, first = words.grams(2)
    assert first.tolist() == [0, 1, 4]  # a b, b c, e f
    assert len(split_words(["a"]).grams(2)[0]) == 0


def test_order_matters_in_a_gram():
    one, other = split_words(["a b"]).grams(2)[0], split_words(["b a"]).grams(2)[0]
    assert one[0] != other[0]


def test_hashes_of_many_words_do_not_collide():
    words = split_words([" ".join(f"{n:x}" for n in range(200_000))])
    # 200,000 values of 64 bits: a clash has a chance of 200000**2 / 2**65 = 1e-9.
    assert len(np.unique(words.hashes)) == 200_000


def test_batches_cover_every_text_once():
    texts = ["x" * n for n in (10, 70_000, 5, 200_000, 1)]
    assert list(in_batches(texts)) == [texts[:2], texts[2:4], texts[4:]]
    assert list(in_batches([])) == []
    words = split_words(["a b", "b " * 40_000, "", "a b c"])
    assert np.bincount(words.documents).tolist() == [2, 40_000, 0, 3]
    # Of one text its n-grams are the same alone and in company.
    assert words.grams(3)[0][-1] == split_words(["a b c"]).grams(3)[0][0]
    assert words.grams_at(3, np.array([0, 1, 40_002, 40_003]))[1].tolist() == [40_002]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x" * 10_000_000, 1),
        ("{" * 10_000_000, 0),
        ("a " * 5_000_000, 5_000_000),
        ("a" + "\u0301\u0316" * 2_500_000, 1),  # accents: normal forms sort them, in quadratic time
    ],
    ids=["word", "braces", "words", "accents"],
)
def test_a_ten_megabyte_text_is_split_in_linear_time(text, count):
    # In quadratic time this would take hours; the suite's own limit ends it then.
    assert len(split_words([text]).hashes) == count


def test_common_subsequence_keeps_the_order():
    # b, d, e of "a b c d e" stand in this order in "b x d a e"
    assert common_subsequence(list("abcde"), list("bxdae")) == 3
    assert common_subsequence([], list("ab")) == common_subsequence(list("ab"), []) == 0


def test_numbers_are_aligned_apart_from_words():
    found = align(["2", "cans", "cost", "five"], ["2", "tins", "cost", "six"])
    assert (found.words, found.numbers) == (0.5, 0.5)  # 2, cost of four words; 2 of (2, five)
    assert align(["no", "quantity"], ["no", "quantity"]).numbers is None


def test_the_densest_window_is_found():
    assert densest_window([3, 50, 52, 55], 10) == (50, 55)
    assert densest_window([7], 10) == (7, 7)
