"""The report: opens offline, shows what the store holds, and nothing that a completion contains becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from eval.report import build_markdown, build_report, duration, markdown_cell, measure, number
from tests.synthetic_run import synthetic_run


class Page(HTMLParser):
    """Elements, attributes, text outside style, and ids of a page; raises where tags do not nest."""

    VOID = ("meta", "br", "img", "link", "path", "use")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def html(run):
    return build_report([run], run.report("report")).read_text(encoding="utf-8")


def test_the_page_asks_for_nothing_from_outside_and_runs_nothing(html):
    page = Page(html)
    assert page.open == []
    assert not {"script", "img", "link", "iframe", "object", "embed"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset")]
    links = [value for name, value in page.attributes if name in ("href", "xlink:href")]
    assert links and all(value.startswith("#") for value in links)
    assert "url(http" not in html and "@import" not in html and "default-src 'none'" in html


def test_a_completion_is_shown_as_text_whatever_it_contains(html):
    text = "".join(Page(html).text)
    assert "</pre></details><script>alert('x')</script><img src=x onerror=alert(1)>" in text
    assert "onerror=alert(1)> {{ 7 * 7 }} {% raw %} $\\frac{1}{ | `code`" in text
    assert "\x00" not in html and "\x1b" not in html and "\u202e" not in html
    assert "‹U+202E›" in text and "‹U+0000›" in text
    assert "+ 1? <b>bold</b>" in text


def test_every_part_of_the_page_is_there(html):
    text = " ".join("".join(Page(html).text).split())
    for words in (
        "What was run", "Maj@K and Pass@K before and after reinforcement learning", "Learning curves",
        "Reward models before and after refresh", "Selection", "Pass@1 by level", "Pass@1 by subject",
        "Problems that moved most", "What to doubt", "torch 2.13.0", "grpo.group_size",
        "reward: verifier", "sft: loss", "1 × warning (equal_rewards), the last: all rewards <equal>",
    ):  # fmt: skip
        assert words in text, words


def test_ids_on_the_page_are_unique_and_every_reference_has_its_target(html):
    page = Page(html)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for name, value in page.attributes if name in ("href", "xlink:href")}
    used |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert used <= set(ids)


def test_the_table_of_checkpoints_says_what_the_store_holds(run, html):
    from eval.gather import gather

    row = gather(run).evaluation("round-02").get("pass@k", 1)
    text = "".join(Page(html).text)
    assert f"{100 * row['value']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]" in text


def test_how_the_problems_were_put_is_stated(html):
    text = "".join(Page(html).text)
    assert "24 problems, 8 samples each at temperature 1, top_p 1, at most 8 tokens, and greedy; engine fake" in text


def test_the_same_run_gives_the_same_file(run, html, tmp_path):
    assert build_report([run], tmp_path / "again.html").read_text(encoding="utf-8") == html


def test_two_runs_stand_side_by_side_with_their_difference(tmp_path):
    runs = [synthetic_run(tmp_path, "first"), synthetic_run(tmp_path, "second", lift=0.3, seed=7)]
    page = Page(build_report(runs, tmp_path / "both.html").read_text(encoding="utf-8"))
    text = "".join(page.text)
    assert page.open == []
    assert "second (final, embedded) is" in text and "points better than first (final, embedded)" in text
    assert "All runs at final: Maj@K and Pass@K" in text
    assert ("class", "differs") in page.attributes  # the seeds of the two recipes differ
    assert ("style", "--mark: var(--c2)") in page.attributes


def test_a_run_without_evaluations_still_has_a_report(tmp_path):
    import shutil

    paths = synthetic_run(tmp_path, "early", problems=4)
    shutil.rmtree(paths.table("evaluations"))
    shutil.rmtree(paths.table("updates"))
    text = "".join(Page(build_report([paths], tmp_path / "early.html").read_text(encoding="utf-8")).text)
    assert "No evaluation is complete" in text


def test_a_run_that_is_not_there_is_one_clear_line(tmp_path):
    from pipeline.rundir import RunPaths

    with pytest.raises(ValueError, match=r"run 'nothing': .*recipe.json is missing"):
        build_report([RunPaths(tmp_path, "nothing")], tmp_path / "x.html")


def test_the_markdown_keeps_every_table_row_whole(run):
    lines = build_markdown(run).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    checkpoints = ["warm-start", "round-01", "round-02", "final"]
    for table in (rows[:6], rows[6:]):
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {len(re.findall(r"\|", table[0]))}
        assert [line.split("|")[1].strip() for line in table[2:]] == checkpoints
    assert any("points better than warm-start" in line for line in lines)


def test_markdown_cells_start_no_markup():
    assert markdown_cell("a|b\n<img> `x` [y](z)") == "a\\|b \\<img\\> \\`x\\` \\[y\\](z)"


def test_figures_are_written_for_people():
    assert [number(v) for v in (None, 12345, 0.00123456, 123456.7, 1.0)] == ["–", "12,345", "0.00123", "123,457", "1"]
    assert measure({"value": 0.625, "low": 0.55, "high": 0.6994}) == "62.5 [55.0, 69.9]"
    assert measure({"value": 41.26, "low": 40.0, "high": 42.5}, percent=False) == "41.3 [40.0, 42.5]"
    assert [duration(s) for s in (4.21, 200, 7500)] == ["4.2 s", "3 min 20 s", "2 h 05 min"]


def test_a_damaged_table_is_named(tmp_path):
    run = synthetic_run(tmp_path, problems=4, samples=8)
    file = next(run.table("rollouts").rglob("*.parquet"))
    file.write_bytes(b"not a table")
    with pytest.raises(ValueError, match=rf"run synthetic: its tables cannot be read: .*{file.name}"):
        build_report([run], run.report("report"))


def test_runs_that_share_no_problem_are_not_compared(run, tmp_path):
    """Seeds of the generator have held-out problems of their own."""
    other = synthetic_run(tmp_path, "elsewhere", first_problem=100)
    html = build_report([run, other], tmp_path / "both.html").read_text(encoding="utf-8")
    assert "were evaluated on different problems: they cannot be paired" in html
