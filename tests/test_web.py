"""Web pages: the classifier on labelled pages, near-duplicates, and how the seed grows."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data.decontaminate import Reference
from data.near_duplicates import signatures, similar_pairs
from data.web import Page, best_pages, candidate_domains, select_pages
from pipeline.config.data import WebConfig

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SMALL = WebConfig(dim=16, min_pages_read=4000, bucket=1000)
MATHS = "solve the equation x plus {} equals {} and find the root of the polynomial number {}"
OTHER = "the senate passed law {} in the year {} after a long debate about the budget of district {}"


@pytest.fixture(scope="module", autouse=True)
def library():
    pytest.importorskip("fasttext", reason="the extra web is not installed")


def pages(count, text, domain):
    return [Page(f"https://{domain}/{n}", text.format(n, n + 7, 3 * n)) for n in range(count)]


def test_the_best_pages_are_kept_up_to_the_words_asked_for():
    scores, words = np.array([0.9, 0.4, 0.95, 0.7], np.float32), np.array([10, 10, 10, 10])
    assert best_pages(scores, words, WebConfig()).tolist() == [True, False, True, True]
    assert best_pages(scores, words, WebConfig(keep_words=20)).tolist() == [True, False, True, False]


def test_a_domain_is_a_candidate_over_the_share():
    domains = ["a"] * 10 + ["b"] * 10
    kept = np.array([True] + [False] * 9 + [True, True] + [False] * 8)
    # a has 1 of 10, which is not more than 10 %; b has 2 of 10.
    assert candidate_domains(domains, kept, 0.1) == {"b"}


def test_the_domain_of_a_page():
    assert Page("https://www.Example.org:80/a?b", "").domain == "example.org"
    assert Page("example.org/a", "").domain == "example.org"


def test_approved_pages_of_candidate_domains_join_the_seed_and_kept_ones_are_clean():
    pool = [
        *pages(60, MATHS, "maths.org"), *pages(200, OTHER, "news.org"),
        Page("https://maths.org/copy", MATHS.format(3, 10, 9)),  # page 3 again
        Page("https://maths.org/test", f"{MATHS.format(500, 507, 1500)} A farmer has 12 hens and sells 5 of them: how many?"),
    ]  # fmt: skip
    seed = [MATHS.format(n, n + 7, 3 * n) for n in range(1000, 1030)]
    bench = [Reference("bench", "1", "problem", "A farmer has 12 hens and sells 5 of them: how many?")]
    config = SMALL.model_copy(update={"approved": ("https://maths.org/*",), "near_duplicates": 0.95})
    selection = select_pages(lambda: pool, seed, bench, config, 0)
    assert selection.kept[:60].all() and not selection.kept[60:260].any()
    assert selection.reasons[260] == "near-duplicate of page 3"
    assert selection.reasons[261].startswith("contaminated: repeats")
    # The 62 pages of maths.org join after the first iteration.
    assert [row["seed"] for row in selection.iterations] == [30, 92]
    alone = select_pages(lambda: pool, seed, bench, SMALL, 0)
    assert len(alone.iterations) == 1


def test_an_empty_pool_is_one_line():
    with pytest.raises(ValueError, match="pool of web pages is empty"):
        select_pages(list, ["x"], [], SMALL, 0)


@pytest.fixture(scope="module")
def labelled():
    if not (SHARED / "web_text.parquet").is_file():
        pytest.skip("the labelled web pages are not beside the repository")
    return pq.read_table(SHARED / "web_text.parquet").to_pylist()


@pytest.mark.slow
def test_the_classifier_on_labelled_pages(labelled):
    from data.fasttext import train

    by_id = {row["doc_id"]: row for row in labelled}

    def in_training(row):
        original = by_id.get(row["dup_of"] or row["doc_id"], row)
        return hashlib.md5(f"{original['source']}/{original['path']}".encode()).digest()[0] % 2 == 0

    learn, test = ([r for r in labelled if in_training(r) is half] for half in (True, False))
    sides = [[r["text"] for r in learn if (r["label"] == "math") is maths] for maths in (True, False)]
    found = train(*sides, WebConfig(), 0).score([r["text"] for r in test]) >= 0.5
    truth = np.array([r["label"] == "math" for r in test])
    assert 2 * (truth & found).sum() / (truth.sum() + found.sum()) >= 0.97


def test_planted_near_duplicates_are_found(labelled):
    position = {row["doc_id"]: i for i, row in enumerate(labelled)}
    found = signatures([row["text"] for row in labelled], 5)
    threshold = WebConfig().near_duplicates
    pairs = set(similar_pairs(found, threshold, threshold))
    planted = {
        tuple(sorted((position[row["doc_id"]], position[row["dup_of"]])))
        for row in labelled
        if row["dup_of"] in position
    }
    assert len(planted & pairs) >= 0.95 * len(planted)
    originals = {row["doc_id"]: row["dup_of"] or row["doc_id"] for row in labelled}
    ids = [originals[row["doc_id"]] for row in labelled]
    # Nothing but copies of one page is called a near-duplicate.
    assert [pair for pair in pairs if ids[pair[0]] != ids[pair[1]]] == []


def test_pages_are_selected_from_files_to_files(tmp_path):
    import json

    from pipeline.config import load_recipe
    from stages.select_web import select_web_files

    pool = [
        *pages(60, MATHS, "maths.org"),
        *pages(120, OTHER, "news.org"),
        Page("https://x.org", MATHS.format(3, 10, 9)),
    ]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps({"url": p.url, "text": p.text}) + "\n" for p in pool))
    seeds = [{"text": MATHS.format(n, n + 7, 3 * n)} for n in range(1000, 1030)]
    (tmp_path / "seed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seeds))
    told, out = [], tmp_path / "out" / "kept.jsonl"
    config = SMALL.model_copy(update={"near_duplicates": 0.95})
    files = (str(tmp_path / "pool.jsonl"), str(tmp_path / "seed.jsonl"))
    select_web_files(load_recipe("embedded"), *files, out, config, write=told.append)
    assert [json.loads(line)["url"] for line in out.read_text().splitlines()] == [p.url for p in pool[:60]]
    (aside,) = (json.loads(line) for line in out.with_suffix(".set_aside.jsonl").read_text().splitlines())
    assert (aside["page"], aside["reason"]) == (180, "near-duplicate of page 3")
    assert told[-1] == "60 pages written, 1 copies and benchmark texts set aside"
    with pytest.raises(ValueError, match=r"seed\.jsonl:1: no column 'url'; columns here: text"):
        select_web_files(load_recipe("embedded"), files[1], files[1], out, config)
