"""Process reward models: where steps end, what a step is worth, and what scores at step ends do to advantages."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from pipeline.advantages import process_advantages
from pipeline.config import EmbeddedModel, RewardModelConfig
from pipeline.config.training import AdvantageConfig
from pipeline.models import build_embedded, load_tokenizer
from rewards.models import OutcomeRewardModel
from rewards.process import ProcessRewardModel, measure_steps, train_process_model
from rewards.steps import Prefix, SteppedSequence, TokenText, label_steps, step_ends, step_label

SHAPE = EmbeddedModel(layers=2, width=32, heads=2, kv_heads=1, intermediate=64, vocabulary=280, context=128)
CORPUS = ["17+25=42\n42-7=35\n\\boxed{35}", "a b c d e"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return build_embedded(SHAPE, CORPUS, 0, tmp_path_factory.mktemp("policy") / "policy")


@pytest.fixture(scope="module")
def tokenizer(policy):
    from pipeline.config import ModelConfig

    return load_tokenizer(policy, ModelConfig())


# -- where steps end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "delimiter", "expected"),
    [
        (["1+1", "=2", "\n", "2", ".", ""], "\n", (2, 5)),
        (["one step", ""], "\n", (1,)),
        (["a", "\n", "\n", "b"], "\n", (2, 3)),  # an empty line belongs to the step before it
        (["a", "\n\n", "b", "\n"], "\n", (1, 3)),
        (["a", "\n", ""], "\n", (2,)),  # what follows the last delimiter holds nothing visible
        (["\n", "\n", "a"], "\n", (2,)),  # leading empty lines are no step
        (["a\nb\nc", "d"], "\n", (0, 1)),  # two delimiters in one token
        (["a", "\n", "b"], "\n\n", (2,)),
        (["a", "\n", "\n", "b"], "\n\n", (2, 3)),  # a delimiter of two tokens
        (["Step 1. x", ". ", "y", ". ", "z"], ". ", (0, 1, 3, 4)),
        ([" ", "\n", " "], "\n", (2,)),
        ([""], "\n", (0,)),
        ([], "\n", ()),
    ],
)
def test_a_step_ends_with_its_delimiter_and_the_last_one_with_the_completion(pieces, delimiter, expected):
    assert step_ends(pieces, delimiter) == expected


def test_steps_rise_and_end_at_the_last_token_whatever_the_text():
    rng = random.Random(0)
    for _ in range(300):
        pieces = [rng.choice(["a", "\n", "", " ", "b\n", "\nc", "\n\n"]) for _ in range(rng.randint(1, 12))]
        ends = step_ends(pieces, "\n")
        assert ends[-1] == len(pieces) - 1
        assert all(a < b for a, b in itertools.pairwise(ends))


def test_pieces_join_to_the_text(tokenizer):
    for text in ("17+25=42\n42-7=35\n\\boxed{35}", "  two  spaces\n\n", "x"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(TokenText(tokenizer).pieces(ids)) == text
    assert TokenText(tokenizer).pieces([tokenizer.eos_token_id]) == [""]


# -- what a step is worth --------------------------------------------------------------------------------------


def test_soft_labels_are_shares_and_hard_ones_say_whether_any():
    verdicts = [True, False, None, False]
    # One of the three that were judged is correct.
    assert step_label(verdicts, "soft") == pytest.approx(1 / 3)
    assert step_label(verdicts, "hard") == 1.0
    assert step_label([False, False], "hard") == 0.0
    assert step_label([None, None], "soft") is None
    assert step_label([], "hard") is None


def test_steps_are_labelled_by_continuing_from_their_ends():
    first = Prefix("p", (1, 2), (10, 11, 12, 13, 14))
    second = Prefix("p", (1, 2), (10, 11, 22, 23))
    asked = []

    def continue_from(prefixes):
        asked.extend(prefixes)
        worth = {(10, 11): [True, True, False, False], (10, 11, 12, 13): [False] * 4, (10, 11, 22): [True, None]}
        return [worth[prefix.completion_token_ids] for prefix in prefixes]

    rows = label_steps([(first, (1, 3, 4), False), (second, (1, 2, 3), None)], continue_from, "soft")
    # The first step is the same text in both: it is continued once, and 2 of 4 are correct. The last step is worth the
    # verdict of the completion itself.
    assert rows[0].labels == (0.5, 0.0, 0.0)
    assert rows[1].labels == (0.5, 1.0, None)
    assert Counter(asked) == {
        Prefix("p", (1, 2), (10, 11)): 1,
        Prefix("p", (1, 2), (10, 11, 12, 13)): 1,
        Prefix("p", (1, 2), (10, 11, 22)): 1,
    }
    assert rows[0] == SteppedSequence((1, 2), (10, 11, 12, 13, 14), (1, 3, 4), (0.5, 0.0, 0.0), "p")


def test_the_same_prefix_of_another_problem_is_another_prefix():
    pairs = [(Prefix(p, (1,), (5, 6)), (0, 1), True) for p in ("p", "q")]
    rows = label_steps(pairs, lambda prefixes: [[prefix.problem_id == "p"] for prefix in prefixes], "hard")
    assert [row.labels for row in rows] == [(1.0, 1.0), (0.0, 1.0)]


def test_completions_of_one_step_need_no_continuation():
    rows = label_steps([(Prefix("p", (1,), (5,)), (0,), True)], lambda prefixes: pytest.fail("asked"), "soft")
    assert rows[0].labels == (1.0,)


def test_a_sampler_that_returns_too_little_is_named():
    with pytest.raises(ValueError, match="verdicts of 0 prefixes for 1"):
        label_steps([(Prefix("p", (1,), (5, 6)), (0, 1), True)], lambda prefixes: [], "soft")


# -- the model -------------------------------------------------------------------------------------------------


CONFIG = RewardModelConfig(lr=3e-3, head_lr=1e-2, batch_size=16, epochs=6)
NEWLINE = "\n"


def toy(count, seed, tokenizer):
    """Three steps of a word each; a step with "b" breaks the solution for good, the others leave it as it was."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        words = [rng.choice("acde") if rng.random() < 0.7 else "b" for _ in range(3)]
        labels = [float("b" not in words[: k + 1]) for k in range(3)]
        completion = [*tokenizer.encode("\n".join(words), add_special_tokens=False), tokenizer.eos_token_id]
        prompt = tokenizer.encode("42" * rng.randint(1, 3), add_special_tokens=False)
        ends = step_ends(TokenText(tokenizer).pieces(completion), NEWLINE)
        rows.append(SteppedSequence(prompt, completion, ends, labels, f"p{index % 10}"))
    return rows


@pytest.fixture(scope="module")
def trained(policy, tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("process") / "model"
    metrics = train_process_model(policy, toy(256, 1, tokenizer), CONFIG, seed=1, out=out)
    return out, metrics


def pairs_of(rows):
    return [(row.prompt_token_ids, row.completion_token_ids) for row in rows]


def test_it_learns_at_which_step_a_solution_breaks(trained, tokenizer):
    rows = toy(100, 2, tokenizer)
    found = ProcessRewardModel.load(trained[0]).score(pairs_of(rows))
    assert [tuple(ends) for _, ends in found] == [row.step_ends for row in rows]
    measures = measure_steps([rewards for rewards, _ in found], rows)
    assert measures["auc"] > 0.95
    assert measures["outcome/auc"] > 0.95
    assert measures["rollouts"] == 200  # two inner steps of each completion
    assert all(0.0 <= reward <= 1.0 for rewards, _ in found for reward in rewards)
    assert trained[1]["labelled_steps"] == 256 * 3


def test_scores_do_not_depend_on_the_batch(trained, tokenizer):
    model, rows = ProcessRewardModel.load(trained[0]), pairs_of(toy(20, 3, tokenizer))
    together = [rewards for rewards, _ in model.score(rows)]
    for row, rewards in zip(rows, together, strict=True):
        assert model.score([row])[0][0] == pytest.approx(rewards, abs=1e-5)


def test_later_tokens_do_not_change_an_earlier_step(trained, tokenizer):
    model = ProcessRewardModel.load(trained[0])
    long = tokenizer.encode("a\nc\nb", add_special_tokens=False)
    other = tokenizer.encode("a\nc\nd", add_special_tokens=False)
    (first, _), (second, _) = model.score([([200], long), ([200], other)])
    assert first[:2] == pytest.approx(second[:2], abs=1e-6)
    assert abs(first[2] - second[2]) > 0.1


def test_step_rewards_become_advantages(trained, tokenizer):
    rows = pairs_of([r for r in toy(40, 4, tokenizer) if len(r.step_ends) == 3][:4])
    found = ProcessRewardModel.load(trained[0]).score(rows)
    lengths = [len(completion) for _, completion in rows]
    out = process_advantages(
        [rewards for rewards, _ in found], [ends for _, ends in found], lengths, ["g"] * 4, AdvantageConfig()
    )
    assert [len(values) for values in out] == lengths
    pooled = np.concatenate([rewards for rewards, _ in found])
    # The last token belongs to the last step alone: its advantage is that step's normalised reward.
    for (rewards, _), values in zip(found, out, strict=True):
        assert values[-1] == pytest.approx((rewards[-1] - pooled.mean()) / pooled.std(), abs=1e-4)
        assert values[0] == pytest.approx(sum((r - pooled.mean()) / pooled.std() for r in rewards), abs=1e-3)


def test_unknown_labels_are_left_out(policy, tokenizer, tmp_path):
    rows = toy(8, 5, tokenizer)
    some = [
        SteppedSequence(r.prompt_token_ids, r.completion_token_ids, r.step_ends, (None, 0.5, None), "p") for r in rows
    ]
    metrics = train_process_model(policy, some, CONFIG, seed=1, out=tmp_path / "some")
    assert (metrics["labelled_steps"], metrics["mean_label"]) == (8, 0.5)
    none = [SteppedSequence(r.prompt_token_ids, r.completion_token_ids, r.step_ends, (None,) * 3, "p") for r in rows]
    with pytest.raises(ValueError, match="no labelled step to train on"):
        train_process_model(policy, none, CONFIG, seed=1, out=tmp_path / "none")


@pytest.mark.parametrize(
    ("ends", "labels", "message"),
    [
        ((0, 1), (1.0,), "1 labels for 2 steps"),
        ((0, 99), (1.0, 1.0), "expected positions in its 2 tokens"),
        ((0, 1), (1.0, 1.5), r"labels in \[0, 1\]"),
        ((0, 1), (float("nan"), 1.0), r"labels in \[0, 1\]"),
    ],
)
def test_steps_that_do_not_fit_are_named(policy, tmp_path, ends, labels, message):
    with pytest.raises(ValueError, match=message):
        train_process_model(
            policy, [SteppedSequence([1], [2, 3], ends, labels, "p")], CONFIG, seed=1, out=tmp_path / "x"
        )


def test_one_kind_of_model_is_not_taken_for_the_other(trained, policy):
    with pytest.raises(ValueError, match=r"no outcome reward model .* says 'process'"):
        OutcomeRewardModel.load(trained[0])
    with pytest.raises(ValueError, match=r"no process reward model .* says 'nothing'"):
        ProcessRewardModel.load(policy)


def test_an_empty_completion_has_no_steps(trained):
    assert ProcessRewardModel.load(trained[0]).score([([5, 6], [])]) == [([], [])]
