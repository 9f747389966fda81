"""What the transformers sampler promises beyond the contract: equal to ``generate``, independent of the batch."""

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from pipeline.backends.probe import measure_gap
from pipeline.backends.torch_learner import TorchLearner
from pipeline.backends.transformers_sampler import TransformersSampler
from pipeline.config import ModelConfig, Recipe, SamplerConfig
from pipeline.protocols import SamplingParams
from tests.policies import CONFIGS, disturb, embedded_folder, full_logprobs, load, policy, prompts


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return embedded_folder(tmp_path_factory.mktemp("embedded"))


def open_with(model: nn.Module, folder, **changes) -> TransformersSampler:
    sampler = TransformersSampler(Recipe(sampler=SamplerConfig(**changes)), folder)
    sampler.load_policy(model, "test")
    return sampler


def seeds(problems: int, samples: int) -> list[list[int]]:
    return [[1000 * p + g for g in range(samples)] for p in range(problems)]


def flat(groups) -> list[tuple[tuple[int, ...], tuple[float, ...], str]]:
    return [(tuple(c.token_ids), tuple(c.logprobs), c.finish_reason) for group in groups for c in group]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_generate_token_by_token(name, folder):
    model = policy(name)
    asked = prompts(9)
    ours = open_with(model, folder).sample(asked, SamplingParams(max_tokens=24, temperature=0.0), [[0]] * 9)
    for prompt, group in zip(asked, ours, strict=True):
        theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, len(prompt) :]
        assert list(group[0].token_ids) == theirs.tolist()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_distribution(name, temperature, folder):
    model = policy(name)
    asked = prompts(5)
    groups = open_with(model, folder).sample(asked, SamplingParams(20, temperature), seeds(5, 3))
    for prompt, group in zip(asked, groups, strict=True):
        for completion in group:
            ids = torch.tensor(completion.token_ids)
            expected = full_logprobs(model, prompt, ids.tolist(), temperature).gather(-1, ids[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def spread(folder, tmp_path_factory):
    """A folder of a policy with many likely tokens, so that rounding shows."""
    there = tmp_path_factory.mktemp("spread")
    disturb(load(folder), seed=4).save_pretrained(there)
    AutoTokenizer.from_pretrained(folder).save_pretrained(there)
    return there


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize(("dtype", "mean", "largest"), [("float32", 2e-6, 1e-4), ("bfloat16", 0.03, 0.1)])
def test_sampler_and_learner_agree_at_every_temperature(dtype, mean, largest, temperature, spread):
    recipe = Recipe(model=ModelConfig(dtype=dtype), sampler=SamplerConfig(max_tokens=32))
    learner, sampler = TorchLearner(recipe, spread), TransformersSampler(recipe, spread)
    sampler.load_policy(learner.live_policy(), "live")
    assert next(learner.live_policy().parameters()).dtype == getattr(torch, dtype)
    gap = measure_gap(sampler, learner, prompts(3)[2], recipe, temperature)
    assert gap.tokens > 60
    assert gap.mean < mean
    assert gap.largest < largest


@pytest.mark.parametrize("name", CONFIGS)
def test_a_completion_does_not_depend_on_its_batch_bit_for_bit(name, folder):
    model = policy(name)
    asked, params = prompts(12, longest=90), SamplingParams(max_tokens=70, temperature=1.3)
    wanted = seeds(12, 4)
    together = flat(open_with(model, folder).sample(asked, params, wanted))
    # 4 slots of 192 tokens (90 + 70, rounded up to whole chunks of 64): rows wait, leave and take over slots.
    assert flat(open_with(model, folder, cache_tokens=4 * 192).sample(asked, params, wanted)) == together
    alone = open_with(model, folder)
    for p in range(0, 12, 3):
        assert flat(alone.sample([asked[p]], params, [wanted[p][1:2]])) == together[4 * p + 1 : 4 * p + 2]
    backwards = open_with(model, folder).sample(asked[::-1], params, [group[::-1] for group in wanted[::-1]])
    assert flat(backwards)[::-1] == together


def test_a_longer_limit_changes_nothing_of_a_completion_that_stopped(folder):
    sampler = open_with(policy("qwen2 tied"), folder)
    asked = prompts(6)
    short = flat(sampler.sample(asked, SamplingParams(40), seeds(6, 8)))
    long = flat(sampler.sample(asked, SamplingParams(200), seeds(6, 8)))
    stopped = [(s, other) for s, other in zip(short, long, strict=True) if s[2] == "stop"]
    assert len(stopped) >= 5
    assert all(s == other for s, other in stopped)
    assert all(other[0][: len(s[0])] == s[0] for s, other in zip(short, long, strict=True))


def test_the_cache_stays_within_its_token_budget(folder, monkeypatch):
    from pipeline.backends import transformers_sampler

    made = []

    class Recording(transformers_sampler.SlotCache):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self.block.shape)

    monkeypatch.setattr(transformers_sampler, "SlotCache", Recording)
    sampler = open_with(policy("qwen2 tied"), folder, cache_tokens=700)
    sampler.sample(prompts(6), SamplingParams(max_tokens=50), seeds(6, 5))
    # The longest of the prompts has 38 tokens: 38 + 50 = 88, rounded up to 128; 700 // 128 = 5 slots.
    assert [tuple(shape) for shape in made] == [(2, 2, 5, 2, 128, 12)]


def test_a_budget_too_small_for_one_completion_names_both_numbers(folder):
    sampler = open_with(policy("qwen2 tied"), folder, cache_tokens=100)
    with pytest.raises(ValueError, match=r"sampler\.cache_tokens is 100.*need 128"):
        sampler.sample(prompts(1), SamplingParams(max_tokens=100), [[0]])


def test_a_live_module_comes_back_as_it_was_and_its_updates_are_seen(folder):
    model = policy("qwen2 untied", seed=5)
    model.train()
    before = model.config._attn_implementation
    sampler = open_with(model, folder)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    first = flat(sampler.sample(prompts(1), params, [[0]]))
    assert model.training
    assert model.config._attn_implementation == before
    with torch.no_grad():
        model.lm_head.weight[77] = model.lm_head.weight[first[0][0][0]] * 3
    assert flat(sampler.sample(prompts(1), params, [[0]]))[0][0][0] == 77


def test_cancelling_leaves_the_sampler_usable(folder):
    model = policy("qwen2 tied")
    sampler = open_with(model, folder)

    def cancel(done, total, note):
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.sample(prompts(6), SamplingParams(60), seeds(6, 4), cancel)
    assert model.config._attn_implementation == "sdpa"
    fresh = open_with(model, folder).sample(prompts(2), SamplingParams(9), seeds(2, 2))
    assert flat(sampler.sample(prompts(2), SamplingParams(9), seeds(2, 2))) == flat(fresh)


def test_a_model_with_attention_of_its_own_is_refused(folder):
    class Odd(nn.Module):
        config = type("Config", (), {"layer_types": ["linear_attention"]})()

    with pytest.raises(ValueError, match=r"layers of type linear_attention.*sampler\.engine = 'vllm'"):
        open_with(Odd(), folder)
