"""Decontamination: the published rule word by word, containment on cases by hand and on a labelled file."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data.decontaminate import Decontaminator, Reference
from data.sources import load_source
from pipeline.config import DataConfig, SourceConfig
from pipeline.config.data import DecontaminateConfig

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
LONG = "a farmer has 12 hens and each of them lays 5 eggs a week how many eggs is that in 3 weeks"  # 21 words


def find(references, text, **config):
    """The benchmark row that the text repeats, or None."""
    found = [Reference("bench", str(i), "problem", reference) for i, reference in enumerate(references)]
    (hit,) = Decontaminator(found, DecontaminateConfig(**config)).scan([text])
    return None if hit is None else hit.reference.row


def paper(references, text):
    return find(references, text, rule="paper")


def test_paper_takes_a_text_with_ten_words_of_a_benchmark_in_a_row():
    ten = " ".join(LONG.split()[4:14])
    nine = " ".join(LONG.split()[4:13])
    assert paper([LONG], f"Before. {ten} after") == "0"
    assert paper([LONG], f"Before. {nine} after") is None
    words = ten.split()
    words[5] = "other"
    assert paper([LONG], f"Before. {' '.join(words)} after") is None


def test_paper_looks_past_case_and_punctuation():
    assert paper([LONG], "A Farmer has 12 hens, and each -- of them -- lays: 5 EGGS!") == "0"


def test_paper_looks_for_benchmark_texts_of_three_to_nine_words_whole():
    nine = "what is the sum of 3 and 4 now"
    assert paper([nine], f"so {nine} then") == "0"
    assert paper([nine], "so what is the sum of 3 and 4 then") is None
    assert paper(["compute 3 plus"], "we compute 3 plus") == "0"
    # Two words are too few to say anything.
    assert paper(["compute 3", LONG], "we compute 3 here") is None


def test_paper_does_not_join_words_over_two_texts():
    first, second = " ".join(LONG.split()[:5]), " ".join(LONG.split()[5:10])
    found = [Reference("bench", "0", "problem", LONG)]
    assert list(Decontaminator(found, DecontaminateConfig(rule="paper")).scan([first, second])) == [None, None]


def test_a_benchmark_without_any_longer_text_is_one_line():
    with pytest.raises(ValueError, match="no benchmark text of three words or more"):
        Decontaminator([Reference("bench", "0", "problem", "2 + 2")], DecontaminateConfig())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LONG, "0"),
        (f"My aunt asked me: {LONG.replace('farmer', 'peasant')}? I did not know.", "0"),
        (LONG.replace("how many", "-- the page turns here -- how many"), "0"),
        (LONG.replace("12", "14"), None),  # 2 of the 3 numbers: a look-alike
        (LONG.replace("3 weeks", "3 weeks").replace("5 eggs", "6 eggs"), None),
        (" ".join(LONG.split()[:8]), None),  # broken off
        ("the hens of the farmer lay eggs, 12 and 5 and 3", None),
    ],
)
def test_containment_tells_changed_copies_from_look_alikes(text, found):
    assert find([LONG], text) == found


def test_containment_can_be_told_to_remove_look_alikes_too():
    assert find([LONG], LONG.replace("12", "14"), same_numbers=0.0) == "0"


def test_the_best_reference_is_named_with_share_and_passage():
    other = LONG.replace("hens", "ducks")
    found = [Reference("bench", "7", "problem", other), Reference("bench", "8", "solution", LONG)]
    (hit,) = Decontaminator(found, DecontaminateConfig()).scan([f"Read this! {LONG.capitalize()}? And go on."])
    assert (hit.reference.row, hit.reference.part, hit.share) == ("8", "solution", 1.0)
    assert "A farmer has 12 hens" in hit.passage


def test_a_text_of_megabytes_is_scanned():
    huge = "lorem ipsum dolor " * 150_000 + LONG
    assert find([LONG], huge) == "0"
    assert find([LONG], r"\frac{" * 500_000) is None


def test_drawings_do_not_count_as_the_problem():
    drawing = "[asy] size(150); real ticklen=3; real tickspace=2; pen p=black+1.3bp; draw((0,0)--(1,1)); [/asy]"
    reference = f"The graph of y = x^2 + 4 is drawn below, for which value of x is y equal to 9? {drawing}"
    assert find([reference], f"How long is the line shown here, in units of its own length, please? {drawing}") is None
    assert find([reference], reference) == "0"


def test_phrases_of_many_references_do_not_count_as_one_of_them():
    made = [LONG.replace("12", f"{n}").replace("5", f"{n + 1}").replace("3", f"{n + 2}") for n in range(1000, 1200)]
    # All but the n-grams with numbers in them stand in 200 references: the copy is found by those, no look-alike is.
    assert find(made, made[7]) == "7"
    assert find(made, LONG) is None
    assert find(made, LONG, same_numbers=0.0) is None
    assert paper(made, made[7]) == "7"
    assert (
        paper([LONG.replace("12 hens", "hens") + f" {n}" for n in range(200)], LONG.replace("12 hens", "hens")) == "0"
    )


@pytest.fixture(scope="module")
def labelled():
    """(rows, references) of the contamination cases: problems and solutions of the GSM8K and MATH tests."""
    if not (SHARED / "contamination.parquet").is_file():
        pytest.skip("the labelled contamination cases are not beside the repository")
    references = []
    for name in ("gsm8k", "math"):
        source = SourceConfig(name=name, path=str(SHARED / f"{name}_test.parquet"))
        for problem in load_source(source, DataConfig(), 0):
            row = problem.meta["row"].rpartition(":")[2]
            references.append(Reference(f"{name}_test", row, "problem", problem.problem))
            references.append(Reference(f"{name}_test", row, "solution", problem.solution))
    return pq.read_table(SHARED / "contamination.parquet").to_pylist(), references


def test_containment_on_labelled_cases(labelled):
    rows, references = labelled
    hits = list(Decontaminator(references, DecontaminateConfig()).scan(row["text"] for row in rows))
    found, total, named = Counter(), Counter(), 0
    for row, hit in zip(rows, hits, strict=True):
        total[row["label"]] += 1
        found[row["label"]] += hit is not None
        if row["label"] == "contaminated" and hit is not None:
            named += (hit.reference.benchmark, hit.reference.row) == (row["benchmark"], str(row["test_row"] + 1))
    assert found["contaminated"] >= 0.95 * total["contaminated"]
    assert found["clean"] <= 0.10 * total["clean"]
    # Some test problems stand twice in the tests, so not every hit can name the same row.
    assert named >= 0.95 * found["contaminated"]


def test_paper_on_labelled_cases_agrees_with_the_rule_spelt_out(labelled):
    rows, references = labelled
    from data.words import words_of

    grams, short = set(), set()
    for reference in references:
        words = words_of(reference.text)
        if 3 <= len(words) < 10:
            short.add(tuple(words))
        grams.update(tuple(words[i : i + 10]) for i in range(len(words) - 9))
    hits = Decontaminator(references, DecontaminateConfig(rule="paper")).scan(row["text"] for row in rows)
    for row, hit in zip(rows, hits, strict=True):
        words = words_of(row["text"])
        expected = any(tuple(words[i : i + 10]) in grams for i in range(len(words))) or any(
            tuple(words[i : i + n]) in short for n in range(3, 10) for i in range(len(words) - n + 1)
        )
        assert (hit is not None) == expected, row["doc_id"]
