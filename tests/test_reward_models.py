"""Outcome reward models: where they are read, what they learn, and the measures that say how well."""

import math
import random

import numpy as np
import pytest
import torch

from pipeline.config import EmbeddedModel, RewardModelConfig
from pipeline.models import build_embedded
from rewards.fitting import _backward, pairwise_loss
from rewards.measures import calibration_error
from rewards.models import LabelledSequence, OutcomeRewardModel, choose_replay, measure, train_outcome_model
from rewards.scalar import Marked, ScalarModel, batches

SHAPE = EmbeddedModel(layers=2, width=32, heads=2, kv_heads=1, intermediate=64, vocabulary=280, context=128)
GOOD, BAD = 100, 101
"""Token ids: the toy completions are right when they hold more of the first than of the second."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return build_embedded(SHAPE, ["one two three 1 2 3"], 0, tmp_path_factory.mktemp("policy") / "policy")


def toy(count, seed, problems=20):
    """Completions of 2 to 20 tokens that are right when GOOD stands in them."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        completion = [rng.randrange(110, 270) for _ in range(rng.randint(2, 20))]
        label = float(rng.random() < 0.5)
        completion[rng.randrange(len(completion))] = GOOD if label else BAD
        prompt = [rng.randrange(110, 270) for _ in range(rng.randint(1, 8))]
        rows.append(LabelledSequence(prompt, completion, label, f"p{index % problems}"))
    return rows


CONFIG = RewardModelConfig(lr=3e-3, head_lr=1e-2, batch_size=16, epochs=6)


@pytest.fixture(scope="module")
def trained(policy, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "model"
    metrics = train_outcome_model(policy, toy(256, 1), CONFIG, seed=3, out=out)
    return out, metrics


def pairs_of(rows):
    return [(row.prompt_token_ids, row.completion_token_ids) for row in rows]


def quality(directory, rows):
    scores = OutcomeRewardModel.load(directory).score(pairs_of(rows))
    return measure(scores, [row.label for row in rows], [row.problem_id for row in rows])


# -- where it is read ------------------------------------------------------------------------------------------


def test_a_score_does_not_depend_on_what_else_is_in_the_batch(trained):
    model = OutcomeRewardModel.load(trained[0])
    rows = pairs_of(toy(30, 7))
    together = model.score(rows)
    alone = [model.score([row])[0] for row in rows]
    assert together == pytest.approx(alone, abs=1e-5)
    assert model.score(rows[::-1])[::-1] == pytest.approx(together, abs=1e-5)


def test_pad_and_eos_ids_inside_a_completion_are_ordinary_tokens(trained):
    model = OutcomeRewardModel.load(trained[0])
    config = model.model.classifier.config
    pad, eos = config.pad_token_id, config.eos_token_id
    # Read by hand at the last token, whatever its id, from a forward pass without any padding.
    for completion in ([120, eos], [120, pad], [pad, eos, eos, eos], [120, pad, 130]):
        ids = torch.tensor([[111, 112, *completion]])
        hidden = model.model.classifier.base_model(input_ids=ids).last_hidden_state
        expected = model.model.classifier.score(hidden[0, -1]).item()
        longer = ([111] * 9, [130] * 9)
        assert model.score([([111, 112], completion), longer])[0] == pytest.approx(expected, abs=1e-5)


def test_the_same_model_scores_the_same_when_pad_is_eos(trained, tmp_path):
    rows = pairs_of(toy(20, 8))
    model = OutcomeRewardModel.load(trained[0])
    before = model.score(rows)
    model.model.classifier.config.pad_token_id = model.model.classifier.config.eos_token_id
    model.model.save(tmp_path)
    (tmp_path / "reward_model.json").write_text((trained[0] / "reward_model.json").read_text())
    assert OutcomeRewardModel.load(tmp_path).score(rows) == before


def test_left_padding_gives_the_same_scores(trained):
    """Against transformers' own classifier, which is given the same sequences padded on the left with a mask."""
    model = OutcomeRewardModel.load(trained[0])
    rows = pairs_of(toy(12, 9))
    width = max(len(p) + len(c) for p, c in rows)
    pad = model.model.classifier.config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p) - len(c)) + [*p, *c] for p, c in rows])
    mask = torch.tensor([[0] * (width - len(p) - len(c)) + [1] * (len(p) + len(c)) for p, c in rows])
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        theirs = model.model.classifier(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 0]
    assert model.score(rows) == pytest.approx(theirs.tolist(), abs=1e-5)


def test_it_loads_anywhere(trained):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    classifier = AutoModelForSequenceClassification.from_pretrained(trained[0])
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    prompt, completion = tokenizer("one two").input_ids, tokenizer(" three").input_ids
    theirs = classifier(torch.tensor([[*prompt, *completion]])).logits.item()
    assert OutcomeRewardModel.load(trained[0]).score([(prompt, completion)]) == pytest.approx([theirs], abs=1e-5)


def test_batches_keep_the_budget_and_every_row():
    lengths = [3, 8, 4, 30, 1, 1, 1]
    found = batches(lengths, 8)
    # 30 alone although it is over the budget; 8 alone; 4 + 3 padded to 2 x 4 = 8; three of length 1.
    assert found == [[3], [1], [2, 0], [4, 5, 6]]
    assert batches([], 8) == []


def test_no_rollouts_no_scores(trained):
    assert OutcomeRewardModel.load(trained[0]).score([]) == []


# -- what it learns --------------------------------------------------------------------------------------------


def test_it_learns_what_makes_a_completion_right(trained, policy):
    out, metrics = trained
    # A head of zeros: the first loss is ln 2 but for what the tenth's later steps learn.
    assert metrics["loss_first"] == pytest.approx(math.log(2), abs=0.15)
    assert metrics["loss_last"] < 0.2
    # 256 rows in steps of 16, six times over.
    assert metrics["steps"] == 96
    found = quality(out, toy(128, 2))
    assert found["auc"] > 0.97
    assert found["pairwise_accuracy"] > 0.95
    assert found["calibration_error"] < 0.1


def test_before_training_every_score_is_zero(policy):
    model = ScalarModel.load(policy)
    rows = [Marked([*r.prompt_token_ids, *r.completion_token_ids], [0]) for r in toy(5, 1)]
    assert model.score(rows) == [[0.0]] * 5


def test_pairs_teach_it_too(policy, tmp_path):
    config = CONFIG.model_copy(update={"objective": "pairwise"})
    metrics = train_outcome_model(policy, toy(256, 1), config, seed=3, out=tmp_path / "model")
    assert metrics["loss_last"] < 0.2
    assert quality(tmp_path / "model", toy(128, 2))["pairwise_accuracy"] > 0.95


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


def test_the_seed_decides_everything(policy, tmp_path):
    config = CONFIG.model_copy(update={"epochs": 1})
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(random.randrange(10**6))  # the global generator has no part in it
        train_outcome_model(policy, toy(64, 1), config, seed=seed, out=tmp_path / name)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")


def test_the_global_generator_is_left_alone(policy, tmp_path):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    train_outcome_model(policy, toy(8, 1), CONFIG.model_copy(update={"epochs": 1}), seed=3, out=tmp_path / "a")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("pairwise", [False, True])
def test_the_token_budget_changes_no_gradient(policy, pairwise):
    rows = [
        Marked([*r.prompt_token_ids, *r.completion_token_ids], [len(r.prompt_token_ids) + 1], [r.label], r.problem_id)
        for r in toy(24, 5, problems=4)
    ]
    gradients = []
    for budget in (10_000, 40):
        model = ScalarModel.load(policy, train=True)
        torch.nn.init.constant_(model.classifier.score.weight, 0.1)
        loss = _backward(model, rows, budget, pairwise)
        gradients.append((loss, torch.cat([p.grad.flatten() for p in model.classifier.parameters()])))
    assert gradients[0][0] == pytest.approx(gradients[1][0], abs=1e-6)
    assert gradients[0][1].abs().max() > 1e-3
    torch.testing.assert_close(gradients[0][1], gradients[1][1], atol=1e-6, rtol=1e-4)


def test_the_pairwise_loss_by_hand():
    rows = [Marked([], [], [t], p) for t, p in ((1.0, "a"), (0.0, "a"), (0.0, "a"), (1.0, "b"), (0.0, "b"), (1.0, "c"))]
    scores = torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0, 5.0])
    # a: the right one leads by 1 and by 0: (ln(1 + e^-1) + ln 2) / 2 = (0.31326 + 0.69315) / 2 = 0.50320;
    # b: it trails by 2: ln(1 + e^2) = 2.12693; c has no pair. Mean of the two problems: 1.31507.
    assert pairwise_loss(scores, rows).item() == pytest.approx(1.31507, abs=1e-5)


def weights_of(directory):
    return ScalarModel.load(directory).classifier.state_dict()


def test_recomputed_activations_give_the_same_weights(policy, tmp_path):
    rows, config = toy(48, 1), CONFIG.model_copy(update={"epochs": 1})
    for name, checkpointing in (("plain", False), ("recomputed", True)):
        changed = config.model_copy(update={"gradient_checkpointing": checkpointing})
        train_outcome_model(policy, rows, changed, seed=3, out=tmp_path / name)
    plain, recomputed = weights_of(tmp_path / "plain"), weights_of(tmp_path / "recomputed")
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_bfloat16_passes_learn_as_well_and_keep_float32_weights(policy, tmp_path):
    metrics = train_outcome_model(
        policy, toy(256, 1), CONFIG.model_copy(update={"dtype": "bfloat16"}), seed=3, out=tmp_path / "m"
    )
    model = OutcomeRewardModel.load(tmp_path / "m")
    assert model.model.dtype == "bfloat16"
    assert {p.dtype for p in model.model.classifier.parameters()} == {torch.float32}
    assert metrics["loss_last"] < 0.2
    assert quality(tmp_path / "m", toy(100, 2, problems=10))["auc"] > 0.95


def test_lora_moves_each_layer_by_a_matrix_of_its_rank_and_learns(policy, tmp_path):
    config = CONFIG.model_copy(update={"lora_rank": 2, "lr": 1e-2})
    train_outcome_model(policy, toy(256, 1), config, seed=3, out=tmp_path / "lora")
    before, after = weights_of(policy), weights_of(tmp_path / "lora")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "score.weight" in moved and any(name.endswith("q_proj.weight") for name in moved)
    assert not any("norm" in name or "embed" in name for name in moved)
    for name in moved - {"score.weight"}:
        values = torch.linalg.svdvals((after[name] - before[name]).double())
        assert values[1] > 0 and values[2] < 1e-5 * values[0]  # rank 2, but for the rounding of the sum
    assert quality(tmp_path / "lora", toy(100, 2, problems=10))["auc"] > 0.9


def test_a_refresh_starts_where_the_model_stood(trained, tmp_path):
    config = RewardModelConfig(lr=1e-9, head_lr=1e-9)
    train_outcome_model(trained[0], toy(16, 4), config, seed=0, out=tmp_path / "next")
    rows = pairs_of(toy(20, 6))
    before, after = (OutcomeRewardModel.load(d).score(rows) for d in (trained[0], tmp_path / "next"))
    assert after == pytest.approx(before, abs=1e-4)
    assert np.std(before) > 1.0


def test_labels_that_are_all_alike_warn(policy, tmp_path, caplog):
    rows = [row for row in toy(40, 1) if row.label == 1.0]
    config = CONFIG.model_copy(update={"objective": "pairwise", "epochs": 1})
    metrics = train_outcome_model(policy, rows, config, seed=0, out=tmp_path / "same")
    assert "labels are 1: nothing can be learnt" in caplog.text
    assert (metrics["steps"], metrics["loss_last"]) == (0, None)
    assert OutcomeRewardModel.load(tmp_path / "same").score(pairs_of(rows[:2])) == [0.0, 0.0]


def test_mistakes_are_told_in_one_line(policy, trained, tmp_path):
    with pytest.raises(ValueError, match=r"no labelled rollout to train on; raise reward_model\.problems"):
        train_outcome_model(policy, [], CONFIG, seed=0, out=tmp_path / "x")
    with pytest.raises(ValueError, match=r"holds no outcome reward model \(reward_model\.json says 'nothing'\)"):
        OutcomeRewardModel.load(policy)
    with pytest.raises(ValueError, match="without prompt and completion tokens"):
        OutcomeRewardModel.load(trained[0]).score([([], [])])
    bad = CONFIG.model_copy(update={"lr": 1e30, "head_lr": 1e30})
    with pytest.raises(RuntimeError, match=r"loss .* in step \d+ of \d+: lower reward_model\.lr"):
        train_outcome_model(policy, toy(64, 1), bad, seed=0, out=tmp_path / "y")


def test_progress_can_cancel(policy, tmp_path):
    seen = []

    def progress(done, total, note):
        seen.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_outcome_model(policy, toy(64, 1), CONFIG, seed=0, out=tmp_path / "z", progress=progress)
    assert seen == [(1, 24), (2, 24)]


# -- replay ----------------------------------------------------------------------------------------------------


def test_replay_is_a_share_of_the_new_rows_drawn_from_the_earlier_ones():
    new, earlier = toy(50, 1), toy(200, 2)
    replay = choose_replay(new, earlier, 0.1, seed=1)
    assert len(replay) == 5  # a tenth of 50
    assert len({id(row) for row in replay}) == 5
    assert all(any(row is old for old in earlier) for row in replay)
    assert choose_replay(new, earlier, 0.1, seed=1) == replay
    assert choose_replay(new, earlier, 0.1, seed=2) != replay


def test_replay_of_little_history_is_all_of_it():
    assert len(choose_replay(toy(50, 1), toy(3, 2), 0.1, seed=1)) == 3
    assert choose_replay(toy(50, 1), [], 0.1, seed=1) == []
    assert choose_replay(toy(50, 1), toy(3, 2), 0.0, seed=1) == []


# -- measures --------------------------------------------------------------------------------------------------


def test_auc_and_pairs_by_hand():
    scores = [3.0, 1.0, 2.0, 2.0, 0.0, 5.0]
    labels = [1, 0, 1, 0, 0, 1]
    problems = ["a", "a", "b", "b", "c", "d"]
    found = measure(scores, labels, problems)
    # Right: 3, 2, 5; wrong: 1, 2, 0. Of nine pairs 3 > 1, 2, 0; 2 > 1, 0 and ties 2; 5 > all: 8.5 / 9.
    assert found["auc"] == pytest.approx(8.5 / 9)
    # a: 1; b: a tie, 0.5; c and d hold one label only: the mean of two is 0.75.
    assert found["pairwise_accuracy"] == 0.75
    assert (found["rollouts"], found["correct_share"]) == (6, 0.5)


def test_auc_equals_counting_all_pairs():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 60).astype(float), rng.integers(0, 2, 60)
    right, wrong = scores[labels == 1], scores[labels == 0]
    counted = np.mean([(r > w) + 0.5 * (r == w) for r in right for w in wrong])
    assert measure(scores, labels, ["p"] * 60)["auc"] == pytest.approx(counted)


def test_calibration_by_hand():
    # Bin 0.1-0.2: mean 0.15, half right: gap 0.35, two rows. Bin 0.9-1: 0.9 and 1.0, both right: gap 0.05, two rows.
    probability, truth = np.array([0.1, 0.19999, 0.9, 1.0]), np.array([True, False, True, True])
    assert calibration_error(probability, truth) == pytest.approx((0.35 * 2 + 0.05 * 2) / 4, abs=1e-4)
    # Logit 0 is probability 0.5: squared error 0.25 whatever the label.
    assert measure([0.0, 0.0], [1, 0], ["a", "a"])["brier"] == 0.25
    assert measure([0.0, 0.0], [1, 0], ["a", "a"])["calibration_error"] == 0.0


def test_what_is_undefined_is_none():
    assert measure([1.0, 2.0], [1, 1], ["a", "a"])["auc"] is None
    assert measure([1.0, 2.0], [1, 0], ["a", "b"])["pairwise_accuracy"] is None
    assert measure([], [], []) == {
        "rollouts": 0, "correct_share": None, "auc": None, "pairwise_accuracy": None, "calibration_error": None,
        "brier": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match="2 scores, 1 labels, 2 problem ids"):
        measure([1.0, 2.0], [1], ["a", "b"])


def test_extreme_scores_are_probabilities_all_the_same():
    found = measure([1e4, -1e4], [1, 0], ["a", "a"])
    assert (found["brier"], found["calibration_error"], found["auc"]) == (0.0, 0.0, 1.0)
