"""The plan: parameters, memory and time by hand on a small shape, and against what really is."""

import json

import pytest

from pipeline.config import ModelConfig, load_recipe
from pipeline.plan.memory import (
    BUCKET,
    CHUNK_ELEMENTS,
    Batch,
    Change,
    Cluster,
    changed,
    layer_bytes,
    learner_bytes,
    micro_batch,
    pass_bytes,
    plan_memory,
    smallest_changes,
)
from pipeline.plan.pace import Lengths, Rates, forward_flops, refresh_seconds, rollout_bytes
from pipeline.plan.shapes import Shape, find_shape, qwen25, shape_of
from pipeline.plan.show import make_plan, plan_lines, table_lines

SMALL = Shape(1, 8, 16, 2, 1, 4, vocabulary=270, tied=True, biases=16)
CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300,
    "num_key_value_heads": 2,
}  # fmt: skip


def plan(recipe, *overrides, gpus=1, gib=80.0):
    return make_plan(load_recipe(recipe, overrides), gpus=gpus, gib=gib, rates=Rates(), prompt=128, completion=None)


def test_parameters_by_hand():
    # Attention 2 x 8 x 4 x (2 + 1) = 192, feed-forward 3 x 8 x 16 = 384; biases 8 + 4 + 4, norms 2 x 8;
    # embedding 270 x 8 = 2,160 and the last norm 8.
    assert SMALL.matrix == 576
    assert SMALL.parameters == 576 + 16 + 16 + 2160 + 8
    # Rank 2: queries and output 2 x (8 + 8), keys and values 2 x (8 + 4), feed-forward 3 x (8 + 16) = 128 a rank.
    assert SMALL.lora_parameters(2) == 256


def test_parameters_of_published_sizes():
    published = {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.61, "14B": 14.8, "32B": 32.8, "72B": 72.7}
    for size, billions in published.items():
        assert qwen25(size).parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert qwen25("0.5B").parameters == 494_032_768  # the sum of the tensors in its model.safetensors


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral"])
def test_parameters_are_those_of_the_model_itself(kind, tied):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **CONFIG, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    assert shape_of(config.to_dict() | {"tie_word_embeddings": tied}, kind).parameters == counted


def test_a_local_folder_says_its_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "qwen2", "tie_word_embeddings": True}))
    assert find_shape(ModelConfig(name=str(tmp_path))).kv_elements == 2 * 2 * 2 * 8


def test_models_that_cannot_be_planned_are_refused_in_a_line(tmp_path):
    with pytest.raises(ValueError, match="model_type is 'mixtral'"):
        shape_of(CONFIG | {"model_type": "mixtral"}, "x")
    with pytest.raises(ValueError, match="no vocab_size"):
        shape_of({k: v for k, v in CONFIG.items() if k != "vocab_size"} | {"model_type": "llama"}, "x")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        find_shape(ModelConfig(name=str(tmp_path)))


def test_a_micro_batch_by_hand():
    # Four completions of 8 after two prompts of 4 are 2 x 4 + 4 x 8 = 40 tokens; keys 2 x 4 + 4 x (4 + 8) = 56.
    assert micro_batch(40, 4, 8, 2, most=100) == Batch(40, 32, 56, 4 * 8 * 12)
    # Larger than the budget: one completion stands alone.
    assert micro_batch(10, 4, 8, 2, most=100).tokens == 12


def test_bytes_of_a_layer_by_hand():
    batch = Batch(40, 32, 56, 384)
    # float32: norms 2 x (4 + 8) x 8 = 192 and feed-forward 4 x 16 x 4 = 256 a token; queries, output twice and a log-sum
    # a head (3 x 8 x 4 + 4 x 2) = 104 a token; keys and values 2 x 8 x 4 = 64 a column; the mask 4 an element.
    assert layer_bytes(SMALL, batch, 4) == (192 + 256 + 104) * 40 + 64 * 56 + 4 * 384
    # bfloat16: 2 x (4 + 4) x 8 = 128, 4 x 16 x 2 = 128, 3 x 8 x 2 + 8 = 56, 32 a column, 2 an element.
    assert layer_bytes(SMALL, batch, 2) == (128 + 128 + 56) * 40 + 32 * 56 + 2 * 384
    kept, _ = pass_bytes(SMALL, batch, 4, checkpointing=True)
    assert kept == 40 * 8 * 4 + layer_bytes(SMALL, batch, 4)


def test_autograd_keeps_what_the_plan_says(tmp_path):
    import torch

    from pipeline.backends.torch_learner import TorchLearner
    from pipeline.batching import pack
    from pipeline.models import build_embedded
    from pipeline.types import TrainSequence

    recipe = load_recipe("embedded", ["runtime.device=cpu", "model.embedded.layers=3", "model.embedded.width=64"])
    learner = TorchLearner(recipe, build_embedded(recipe.model.embedded, ["1 + 2 = 3"], 0, tmp_path))
    group = [TrainSequence(str(g), "g", (7,) * 64, (5 + g,) * 96) for g in range(4)]
    own = {p.untyped_storage().data_ptr() for p in learner._model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner._forward(pack(group, range(4), layout="shared"), 1.0)
    batch, shape = micro_batch(64 + 4 * 96, 64, 96, 4, most=4), find_shape(recipe.model)
    # After the layers: the last norm's input, what its weight multiplies, its output, and the rows that are predicted.
    end = (3 * batch.tokens + batch.completion_tokens) * shape.width * 4
    measured = sum(size for pointer, (size, _) in kept.items() if pointer not in own)
    assert 3 * layer_bytes(shape, batch, 4) + end == pytest.approx(measured, rel=0.03)


def test_learner_bytes_by_hand():
    n = SMALL.parameters
    recipe = load_recipe("embedded")
    expected = {
        "weights": 4 * n,
        "float32 masters": 0,
        "moments": 8 * n,
        "gradients": 4 * n,
        "communication buffers": 0,
    }
    assert learner_bytes(recipe, SMALL) == expected
    half = load_recipe("embedded", ["model.dtype=bfloat16"])
    assert learner_bytes(half, SMALL) == expected | {"weights": 2 * n, "float32 masters": 4 * n}
    # ZeRO over four ranks, arXiv 1910.02054: stage 2 shares gradients and optimizer, stage 3 the weights too.
    sharded = ["model.dtype=bfloat16", "learner.backend=deepspeed", "learner.ranks=4", "learner.zero_stage="]
    stages = [learner_bytes(load_recipe("embedded", [*sharded[:3], f"{sharded[3]}{s}"]), SMALL) for s in (1, 2, 3)]
    assert [s["weights"] for s in stages] == [2 * n, 2 * n, n / 2]
    assert [s["gradients"] for s in stages] == [4 * n, n, n]
    assert {s["float32 masters"] + s["moments"] for s in stages} == {3 * n}


def test_sizes_that_the_plan_repeats_are_those_of_the_learner():
    from pipeline.backends import token_logprobs, zero

    assert CHUNK_ELEMENTS == token_logprobs.CHUNK_ELEMENTS
    assert BUCKET == zero.BUCKET


def test_a_recipe_that_is_too_large_says_what_to_change():
    planned = plan("gsm8k_qwen", "model.name=Qwen/Qwen2.5-7B-Instruct", "rewards.weights={verifier=1.0}", gib=80)
    text = "\n".join(plan_lines(planned))
    assert "DOES NOT FIT: update takes" in text
    changes = planned.changes()
    # Weights, float32 masters, moments and gradients are 18 bytes a parameter, 128 GiB: they have to leave the GPU.
    assert Change("learner.offload_optimizer", True) in changes
    assert all(f"--set {change.text}" in text for change in changes)
    assert planned.lacking(changed(planned.recipe, changes)) == 0


def test_changes_that_are_not_needed_are_left_out():
    recipe = load_recipe("gsm8k_qwen", ["learner.gradient_checkpointing=false"])

    def lacking(tried):  # the checkpointing helps, but lowering the reward model's budget alone is enough
        return max(
            0.0, 10.0 - 2 * tried.learner.gradient_checkpointing - 20 * (tried.reward_model.token_budget < 16384)
        )

    assert smallest_changes(recipe, 1, lacking) == [Change("reward_model.token_budget", 8192)]
    assert smallest_changes(recipe, 1, lambda tried: 1.0) is None


def test_weights_are_opened_whole_unless_zero_3_shares_them_out():
    cluster, overrides = Cluster(8, 80 * 2**30), ["model.name=Qwen/Qwen2.5-72B-Instruct", "learner.ranks=8"]
    whole = load_recipe("math_qwen", [*overrides, "learner.zero_stage=2"])
    parts = load_recipe("math_qwen", [*overrides, "learner.zero_stage=3"])
    n, process = qwen25("72B").parameters, 2**30
    assert plan_memory(whole, qwen25("72B"), cluster, 128).totals[0] == 4 * n + process
    # An eighth twice in float32, and the largest matrix, 29,568 x 8,192 or 152,064 x 8,192.
    assert plan_memory(parts, qwen25("72B"), cluster, 128).totals[0] == 8 * n / 8 + 4 * 152_064 * 8192 + process


def test_operations_and_bytes_by_hand():
    # 10 tokens x (2 x 576 + attention 4 x 8 x 4) + 3 logits x 2 x 270 x 8
    assert forward_flops(SMALL, 10, 4, 3) == 10 * (1152 + 128) + 12_960
    assert rollout_bytes(Lengths(100, 200)) == 120 + 5.5 * 200 + 1.5 * 100
    assert refresh_seconds(load_recipe("smollm2"), SMALL, Rates(), Lengths(1, 1)) == 0


def test_amounts_that_are_impossible_are_refused_in_a_line():
    with pytest.raises(ValueError, match="--gpu-memory is 0: expected more than 0"):
        plan("embedded", gib=0)
    with pytest.raises(ValueError, match=r"--gpus is 2, but learner\.backend is 'torch'"):
        plan("embedded", gpus=2)


def test_the_table_has_a_row_a_size():
    recipe = load_recipe("math_qwen", ["rewards.weights={verifier = 1.0}"])
    rows = table_lines(recipe, gib=80, rates=Rates(), gpus=(8,))
    assert len(rows) == 2 + 7
    assert rows[-1].startswith("| 72B |")
