"""Problem sets: gold answers, solutions, levels and ids as each set stores them."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data.sources import load_source
from data.text import last_boxed, problem_id
from pipeline.config import DataConfig, SourceConfig

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def load(tmp_path, rows, name="file", file="set.jsonl", **config):
    path = tmp_path / file
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_source(SourceConfig(name=name, path=str(path), **config), DataConfig(), 0)


def shared(name, file, **config):
    path = SHARED / file
    if not path.is_file():
        pytest.skip(f"{file} is not beside the repository")
    return load_source(SourceConfig(name=name, path=str(path), **config), DataConfig(), 0)


def test_gsm8k_takes_what_follows_the_marker_and_drops_annotations(tmp_path):
    row = {"question": "How many?", "answer": "She has 6*200=<<6*200=1200>>1200.\n#### 1,200"}
    (problem,) = load(tmp_path, [row], name="gsm8k")
    assert (problem.answer, problem.solution) == ("1200", "She has 6*200=1200.")
    assert problem.source == "gsm8k"


def test_math_takes_the_last_box_and_the_number_of_the_level(tmp_path):
    row = {"problem": "P", "level": "Level 3", "type": "Algebra", "solution": r"\boxed{1} then \boxed{\frac{1}{2}}."}
    (problem,) = load(tmp_path, [row], name="math")
    assert (problem.answer, problem.level, problem.subject) == (r"\frac{1}{2}", 3, "Algebra")
    (unknown,) = load(tmp_path, [{**row, "level": "Level ?"}], name="math")
    assert unknown.level is None


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"a \boxed{1} b \boxed{2}", "2"),
        (r"\boxed{\text{a {nested} b}}", r"\text{a {nested} b}"),
        (r"\boxed 2.", "2"),
        (r"\boxed\pi", r"\pi"),
        (r"\boxed{}", ""),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{unclosed", None),
        ("none", None),
        ("\\boxed{" * 100_000, None),
    ],
)
def test_the_last_box(text, gold):
    assert last_boxed(text) == gold


def test_a_column_mapping_names_their_columns(tmp_path):
    row = {"Q": "How many?", "A": 7.0, "L": "5", "why": "Because.", "topic": ["sets"], "key": 12}
    columns = {"problem": "Q", "answer": "A", "level": "L", "solution": "why", "subject": "topic", "id": "key"}
    (problem,) = load(tmp_path, [row], columns=columns)
    assert (problem.problem, problem.answer, problem.level) == ("How many?", "7", 5)
    assert (problem.solution, problem.subject, problem.meta["id"]) == ("Because.", "sets", "12")


def test_without_an_answer_column_the_solution_holds_the_gold(tmp_path):
    rows = [{"problem": "P", "solution": r"so \boxed{4}"}, {"problem": "Q", "solution": "so\n#### 5"}]
    assert [p.answer for p in load(tmp_path, rows)] == ["4", "5"]


def test_a_problem_knows_its_set_and_row(tmp_path):
    problems = load(tmp_path, [{"problem": "P", "answer": "1"}, {"problem": "Q", "answer": "2"}])
    assert [(p.source, p.meta["row"]) for p in problems] == [("set", "set.jsonl:1"), ("set", "set.jsonl:2")]
    assert load(tmp_path, [{"problem": "P", "answer": "1"}], alias="mine")[0].source == "mine"


def test_ids_come_from_the_text_alone(tmp_path):
    (first,) = load(tmp_path, [{"problem": "What  is\n1+1?", "answer": "2"}])
    (second,) = load(tmp_path, [{"question": "What is 1+1? ", "answer": "#### 3"}], name="gsm8k", file="other.jsonl")
    assert first.problem_id == second.problem_id == problem_id("What is 1+1?")
    # Case and signs can change what is asked.
    assert len({problem_id(t) for t in ("What is a+1?", "What is A+1?", "What is a-1?")}) == 3


def test_control_characters_leave_the_texts(tmp_path):
    (problem,) = load(tmp_path, [{"problem": "a\x00b\tc\n", "answer": "\x001"}])
    assert (problem.problem, problem.answer) == ("ab\tc", "1")


def test_a_limit_takes_the_first(tmp_path):
    rows = [{"problem": f"{n}?", "answer": "1"} for n in range(5)]
    assert [p.problem for p in load(tmp_path, rows, limit=2)] == ["0?", "1?"]


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        (
            [{"question": "Q", "answer": "1"}],
            {},
            r"set\.jsonl:1: no column 'problem' for problem; columns here: question, answer",
        ),
        ([{"problem": "Q"}], {}, r"set\.jsonl:1: no column 'answer' for answer"),
        ([{"problem": "Q", "answer": "1"}], {"columns": {"level": "lvl"}}, r"no column 'lvl' for level"),
        (
            [{"problem": "Q", "answer": "1"}],
            {"columns": {"prob": "x"}},
            r"columns maps 'prob'; expected one of problem",
        ),
        (
            [{"problem": "P", "answer": "1", "id": 1}, {"problem": "Q", "answer": "1", "id": 1}],
            {"columns": {"id": "id"}},
            r"set\.jsonl:2: id '1' was used before at .*set\.jsonl:1",
        ),
        ([{"problem": "Q", "solution": "#### 1"}], {"name": "gsm8k"}, r"no column 'answer' for solution"),
    ],
)
def test_bad_columns_are_one_line(tmp_path, rows, config, message):
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, rows, **config)
    assert "\n" not in str(error.value)


def test_a_file_source_needs_a_path():
    with pytest.raises(ValueError, match="source 'file' needs path"):
        load_source(SourceConfig(name="file"), DataConfig(), 0)


def test_an_unreachable_hub_set_names_the_offline_way(monkeypatch):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ValueError, match=r"'openai/gsm8k' .* cannot be read: Couldn't reach.* Offline: set path = "
    ) as error:
        load_source(SourceConfig(name="gsm8k"), DataConfig(), 0)
    assert "\n" not in str(error.value)


def test_hub_sets_are_read_with_the_recipes_choice(monkeypatch):
    import datasets

    asked = []

    def fake(name, subset, **options):
        asked.append((name, subset, options))
        return iter([{"problem": f"{subset}?", "solution": r"\boxed{1}", "level": "Level 1", "type": "T"}])

    monkeypatch.setattr(datasets, "load_dataset", fake)
    source = SourceConfig(name="math", split="test", revision="abc", streaming=True)
    problems = load_source(source, DataConfig(), 0)
    assert len(problems) == 7  # one of each of MATH's seven subjects
    assert asked[0] == (
        "EleutherAI/hendrycks_math", "algebra", {"split": "test", "revision": "abc", "streaming": True},
    )  # fmt: skip


def test_every_other_hub_name_takes_a_mapping(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"Q": "1+1?", "A": "2"}]))
    source = SourceConfig(name="someone/sums", columns={"problem": "Q", "answer": "A"})
    (problem,) = load_source(source, DataConfig(), 0)
    assert (problem.problem, problem.answer, problem.source) == ("1+1?", "2", "someone/sums")


def test_gsm8k_on_the_real_files():
    train, test = shared("gsm8k", "gsm8k_train.parquet"), shared("gsm8k", "gsm8k_test.parquet")
    assert (len(train), len(test)) == (7473, 1319)
    # Every final answer is an integer once its commas are gone, and no annotation is left.
    assert all(p.answer.lstrip("-").isdigit() for p in [*train, *test])
    assert not any("<<" in p.solution or "####" in p.solution for p in train)


def test_math_on_the_real_files():
    if not (SHARED / "math_answers.parquet").is_file():
        pytest.skip("math_answers.parquet is not beside the repository")
    expected = {
        (row["split"], row["row"]): row["answer"] for row in pq.read_table(SHARED / "math_answers.parquet").to_pylist()
    }
    different = 0
    for split in ("train", "test"):
        problems = shared("math", f"math_{split}.parquet")
        assert sum(p.level is None for p in problems) == (2 if split == "train" else 0)  # "Level ?"
        assert sum(not p.answer for p in problems) == (2 if split == "train" else 0)  # the two empty boxes
        different += sum(expected[split, i].strip() != p.answer for i, p in enumerate(problems))
    assert different == 0


def test_the_other_real_files():
    math500 = shared("math500", "math500.parquet")
    assert len(math500) == 500 and all(p.answer == last_boxed(p.solution) for p in math500)
    assert {p.level for p in math500} == {1, 2, 3, 4, 5}
    svamp = shared("svamp", "svamp.parquet")
    assert len(svamp) == 1000 and all(p.answer.lstrip("-").replace(".", "").isdigit() for p in svamp)
    german = shared("mgsm", "mgsm.parquet", config="de")
    assert len(german) == 250 and german[0].source == "mgsm/de"
    columns = {"problem": "question", "answer": "final_answer", "subject": "subfield"}
    olympiad = shared("file", "olympiadbench_math_en.parquet", columns=columns)
    assert len(olympiad) == 675 and olympiad[0].subject


def test_procedural_tasks_share_the_limit_and_depend_on_the_seed():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    source = SourceConfig(name="reasoning_gym", tasks=("basic_arithmetic", "gcd"), limit=5)
    problems = load_source(source, DataConfig(), 0)
    # 5 over two tasks: 3 and 2.
    assert [p.subject for p in problems] == ["basic_arithmetic"] * 3 + ["gcd"] * 2
    assert all(p.answer and p.meta["reasoning_gym"]["entry"]["question"] for p in problems)
    assert load_source(source, DataConfig(), 0) == problems
    assert load_source(source, DataConfig(), 1) != problems
    with pytest.raises(ValueError, match="task 'gdc' cannot be made"):
        load_source(source.model_copy(update={"tasks": ("gdc",)}), DataConfig(), 0)
    with pytest.raises(ValueError, match="needs tasks = names of its tasks"):
        load_source(SourceConfig(name="reasoning_gym"), DataConfig(), 0)
