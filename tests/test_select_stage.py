"""The selection stage: what it records, what it sets aside and why, and what it refuses before any training."""

import json

import pyarrow.parquet as pq
import pytest

from data.sources import load_source
from pipeline.config import load_recipe
from pipeline.rundir import RunPaths, StageContext, write_result
from stages import select
from tests.tokenizers_for_tests import embedded_tokenizer


def accept(problems):
    return [None] * len(problems)


def write_jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rows_of(count, start=0):
    return [{"problem": f"What is {n} plus {n}, please?", "answer": str(2 * n)} for n in range(start, start + count)]


def recipe_for(*files, **data):
    """The embedded recipe with these local files as its sources."""
    sources = ", ".join(f'{{name="file", path="{file}"}}' for file in files)
    changes = [f"data.sources=[{sources}]", *(f"data.{key}={value}" for key, value in data.items())]
    return load_recipe("embedded", changes)


def run(recipe, root, accept_gold=accept, run_id="a"):
    context = StageContext(recipe, RunPaths(root, run_id), "select")
    result = select.run(context, embedded_tokenizer(), accept_gold)
    write_result(context.paths, result)
    return context.paths, result


def test_the_embedded_problems_come_back_as_they_were_selected(tmp_path):
    recipe = load_recipe("embedded", ["data.embedded.train=40", "data.embedded.heldout=8"])
    paths, result = run(recipe, tmp_path)
    problems = select.load_problems(paths)
    loaded = load_source(recipe.data.sources[0], recipe.data, recipe.seed)
    assert [p.problem for p in problems] == [p.problem for p in loaded]
    assert (result.metrics["train"], result.metrics["heldout"], result.metrics["set_aside"]) == (40, 8, 0)
    tokenizer = embedded_tokenizer()
    assert all(tokenizer.decode(p.prompt_token_ids) == p.prompt for p in problems)
    assert all(p.solution.endswith(f"\\boxed{{{p.answer}}}") for p in problems)


def test_two_runs_of_one_recipe_select_the_same(tmp_path):
    recipe = load_recipe("embedded", ["data.embedded.train=40", "data.embedded.heldout=8"])
    first, second = run(recipe, tmp_path)[0], run(recipe, tmp_path, run_id="b")[0]
    assert select.load_problems(first) == select.load_problems(second)


def test_every_row_that_left_is_in_the_file_with_its_reason(tmp_path):
    rows = [
        *rows_of(20),
        {"problem": "What is 3 plus 3,  please?", "answer": "6"},  # row 4 again, but for a blank
        {"problem": "Gold is empty?", "answer": ""},
        {"problem": "Too long " + "and long " * 80, "answer": "1"},
        {"problem": "Odd gold?", "answer": "seven-ish"},
    ]
    recipe = recipe_for(write_jsonl(tmp_path / "set.jsonl", rows), heldout_share=0.3, max_prompt_tokens=60)

    def refuse_odd(problems):
        return ["not a number" if p.answer == "seven-ish" else None for p in problems]

    paths, result = run(recipe, tmp_path, refuse_odd)
    aside = pq.read_table(paths.directory / result.outputs["set_aside"]).to_pylist()
    assert {row["rule"]: row["problem"][:9] for row in aside} == {
        "empty": "Gold is e", "duplicate": "What is 3", "prompt": "Too long ", "gold": "Odd gold?",
    }  # fmt: skip
    by_rule = {row["rule"]: row for row in aside}
    assert by_rule["duplicate"]["reason"] == "same text as set set.jsonl:4"
    assert by_rule["gold"]["reason"] == "not a number"
    assert "over data.max_prompt_tokens = 60" in by_rule["prompt"]["reason"]
    for before, after in zip(result.metrics["funnel"], result.metrics["funnel"][1:], strict=False):
        assert after["came_in"] == before["kept"] == after["kept"] + after["set_aside"]
    assert result.metrics["funnel"][0]["kept"] == 24 == len(select.load_problems(paths)) + len(aside)


def test_a_run_without_problems_says_which_stage_is_missing(tmp_path):
    with pytest.raises(ValueError, match="its stage select is not complete"):
        select.load_problems(RunPaths(tmp_path, "none"))


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        ([], {}, r"set\.jsonl: has no rows"),
        (
            [{"problem": "P?", "answer": ""}] * 3,
            {},
            r"source 'set': 3 of 3 problems cannot be used.*gold answer is empty",
        ),
        (rows_of(20), {"heldout_share": "0.0"}, "no heldout problem is left of the 20"),
        (
            rows_of(20),
            {"max_prompt_tokens": "2"},
            "no train problem is left of the 20 .*prompt took 20.*loosen that rule",
        ),
        (rows_of(20), {"template": '"boxd"'}, "data.template 'boxd': expected one of"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(tmp_path, rows, data, message):
    recipe = recipe_for(write_jsonl(tmp_path / "set.jsonl", rows), **data)
    with pytest.raises(ValueError, match=message) as error:
        run(recipe, tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a" / "tables").exists()


def test_golds_that_the_verifier_refuses_stop_the_run_when_there_are_too_many(tmp_path):
    recipe = recipe_for(write_jsonl(tmp_path / "set.jsonl", rows_of(20)))
    with pytest.raises(ValueError, match=r"source 'set': 20 of 20 .*max_gold_rejects = 0\.1.*'0': unreadable"):
        run(recipe, tmp_path, lambda problems: ["unreadable"] * len(problems))


def test_a_benchmark_that_is_the_training_set_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "set.jsonl", rows_of(20))
    recipe = recipe_for(file, benchmarks=f'[{{name="file", path="{file}", alias="bench"}}]')
    with pytest.raises(ValueError, match=r"benchmark 'bench' is also the training set 'set': 20 of its 20 problems"):
        run(recipe, tmp_path)


def test_ids_that_clash_between_sets_are_one_line(tmp_path):
    files = []
    for name, start in (("one", 0), ("two", 50)):
        rows = [{**row, "id": f"q{i}"} for i, row in enumerate(rows_of(10, start))]
        files.append(write_jsonl(tmp_path / f"{name}.jsonl", rows))
    sources = ", ".join(f'{{name="file", path="{file}", columns={{id="id"}}}}' for file in files)
    recipe = load_recipe("embedded", [f"data.sources=[{sources}]"])
    with pytest.raises(ValueError, match=r"id 'q0' names two problems, at one one\.jsonl:1 and at two two\.jsonl:1"):
        run(recipe, tmp_path)


def test_two_files_of_one_name_need_an_alias(tmp_path):
    files = []
    for folder, start in (("x", 0), ("y", 50)):
        (tmp_path / folder).mkdir()
        files.append(write_jsonl(tmp_path / folder / "train.jsonl", rows_of(10, start)))
    with pytest.raises(ValueError, match=r"data\.sources has two sets named 'train'.*alias"):
        recipe_for(*files)


def test_benchmarks_are_held_out_and_their_copies_leave_training(tmp_path):
    story = "A farmer has 12 hens and each of them lays 5 eggs a week. How many eggs is that in 3 weeks?"
    bench = write_jsonl(tmp_path / "bench.jsonl", [{"problem": story, "answer": "180"}])
    copy = {"problem": story.replace("farmer", "peasant"), "answer": "180"}
    file = write_jsonl(tmp_path / "set.jsonl", [*rows_of(12), copy])
    recipe = recipe_for(file, benchmarks=f'[{{name="file", path="{bench}"}}]')
    paths, result = run(recipe, tmp_path)
    assert (result.metrics["train"], result.metrics["heldout"]) == (12, 1)
    (row,) = pq.read_table(paths.directory / result.outputs["set_aside"]).to_pylist()
    assert (row["rule"], json.loads(row["evidence"])["row"]) == ("decontaminate", "bench.jsonl:1")


def test_short_problems_of_one_set_do_not_push_each_other_out(tmp_path):
    rows = [{"problem": f"{a}+{b}=?", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    rows += [{"problem": f"What is {a} plus {a}?", "answer": str(2 * a)} for a in range(20, 50)]
    rows += [{"problem": f"What is {a} plus {a} plus 1?", "answer": str(2 * a + 1)} for a in range(20, 50)]
    recipe = recipe_for(write_jsonl(tmp_path / "set.jsonl", rows), heldout_share=0.3, near_duplicates="1.0")
    _, result = run(recipe, tmp_path)
    assert result.metrics["set_aside"] == 0
    asked = [{"problem": f"{words} 30 plus 30?", "answer": "60"} for words in ("What is", "Tell me", "Work out")]
    bench = write_jsonl(tmp_path / "bench.jsonl", asked)
    recipe = recipe_for(tmp_path / "set.jsonl", benchmarks=f'[{{name="file", path="{bench}"}}]', near_duplicates="1.0")
    paths, result = run(recipe, tmp_path, run_id="b")
    # Against a benchmark the published rule holds: its five words stand in two of the problems.
    aside = pq.read_table(paths.directory / result.outputs["set_aside"]).to_pylist()
    assert [row["problem"] for row in aside] == ["What is 30 plus 30?", "What is 30 plus 30 plus 1?"]


def test_nul_bytes_long_texts_and_deep_latex_pass_through(tmp_path):
    rows = [
        *rows_of(20),
        {"problem": "What is\x00 1+1, in \ud800 short?", "answer": "2"},
        {"problem": "x" * 10_000_000, "answer": "1"},
        {"problem": "Deep " + "\\sqrt{" * 100_000 + "4" + "}" * 100_000, "answer": "2"},
    ]
    recipe = recipe_for(write_jsonl(tmp_path / "set.jsonl", rows))
    paths, result = run(recipe, tmp_path)
    texts = [p.problem for p in select.load_problems(paths)]
    assert "What is 1+1, in  short?" in texts
    assert (result.metrics["set_aside"], len(texts)) == (2, 21)


def test_the_stage_alone_reads_and_writes_files(tmp_path):
    rows = [*rows_of(30), {"problem": "What is 3 plus 3,  please?", "answer": "6"}]
    recipe = recipe_for(write_jsonl(tmp_path / "set.jsonl", rows), heldout_share=0.2)
    told = []
    selection = select.select_files(recipe, tmp_path / "new" / "out.jsonl", show=2, write=told.append)
    written = [json.loads(line) for line in (tmp_path / "new" / "out.jsonl").read_text().splitlines()]
    assert [row["problem"] for row in written] == [p.problem for p in selection.problems]
    assert len(pq.read_table(tmp_path / "new" / "out.set_aside.parquet")) == 1
    assert json.loads((tmp_path / "new" / "out.funnel.json").read_text()) == selection.funnel
    prompts = [line for line in told if line.startswith("<|user|>")]
    assert prompts == [p.prompt for p in selection.problems if p.split == "train"][:2]
    assert any(line.split()[:4] == ["duplicate", "31", "1", "30"] for line in told)
    with pytest.raises(ValueError, match=r"--out .*out\.txt: expected a name that ends in \.jsonl or \.parquet"):
        select.select_files(recipe, tmp_path / "out.txt")
