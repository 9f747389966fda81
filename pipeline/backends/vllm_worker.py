"""The process around one vLLM engine: takes requests from the sampler's process, steps the engine, sends results back.

Started as ``python -m pipeline.backends.vllm_worker FD`` with one end of a socket pair. Messages are tuples:
in  (options,) first; then ("load", folder) · ("transfer", method, arguments) · ("cancel",) · ("close",) ·
    ("add", [(key, prompt, seed), …], parameters)
out ("ready", context, vocabulary) · ("loaded", checksum) · ("done", [(key, ids, logprobs, reason, seconds), …]) ·
    ("cancelled",) · ("refused", message)
Everything is read between two steps, so a cancellation takes one step. The process ends with the sampler's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any


class EngineLoop:
    """One engine and its running requests."""

    def __init__(self, connection: Connection, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.connection = connection
        self.sleeps = options.pop("sleep_after_use")
        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.started: dict[str, float] = {}
        self.asleep = False
        config = self.engine.model_config
        connection.send(("ready", config.max_model_len, config.get_vocab_size()))

    def run(self) -> None:
        """Serve until told to close; EOFError when the sampler's process is gone."""
        while True:
            while not self.started or self.connection.poll():
                message, *arguments = self.connection.recv()
                if message == "close":
                    return
                try:
                    getattr(self, message)(*arguments)
                except ValueError as error:
                    self.connection.send(("refused", str(error)))
            self._step()

    def load(self, folder: str) -> None:
        """Take over a checkpoint's weights and forget every prefix computed with the old ones."""
        self._wake()
        self._loaded(self.llm.collective_rpc("load_policy", args=(folder,)))

    def transfer(self, method: str, arguments: tuple[Any, ...]) -> None:
        """One call of vLLM's weight transfer (see ``vllm_transfer``); the last one forgets prefixes as ``load`` does."""
        self._wake()
        try:
            if method == "start_weight_update":
                self.llm.collective_rpc("watch_transfer")
            self.llm.collective_rpc(method, args=arguments)
        except Exception as error:  # whatever vLLM finds wrong with the weights: the sampler ends this engine
            traceback.print_exc()
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if method == "finish_weight_update":
            self._loaded(self.llm.collective_rpc("finish_transfer"))
        else:
            self.connection.send(("loaded", ""))

    def _loaded(self, checksums: list[str]) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: it would answer with the weights before")
        self.connection.send(("loaded", "+".join(sorted(set(checksums)))))

    def add(self, requests: list[tuple[str, list[int], int]], parameters: dict[str, Any]) -> None:
        """Queue one completion a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._wake()
        for key, prompt, seed in requests:
            params = SamplingParams(
                **parameters, seed=seed, logprobs=0, ignore_eos=True, detokenize="stop" in parameters,
                skip_special_tokens=False, output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            self.engine.add_request(key, {"prompt_token_ids": prompt}, params)
            self.started[key] = time.perf_counter()

    def cancel(self) -> None:
        """Drop everything that runs or waits."""
        self.engine.abort_request(list(self.started))
        self.started.clear()
        self.connection.send(("cancelled",))

    def _step(self) -> None:
        now, done = time.perf_counter(), []
        outputs: list[Any] = self.engine.step()  # of a generation engine: never a pooling output
        for output in outputs:
            if output.finished and output.request_id in self.started:
                completion = output.outputs[0]
                ids = list(completion.token_ids)
                logprobs = [entry[i].logprob for i, entry in zip(ids, completion.logprobs, strict=True)]
                seconds = now - self.started.pop(output.request_id)
                done.append((output.request_id, ids, logprobs, completion.finish_reason, seconds))
        if done:
            self.connection.send(("done", done))
        if not self.started and self.sleeps:
            self.llm.sleep(level=1)
            self.asleep = True

    def _wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False


def _end_with(parent: int) -> None:
    """End when the sampler's process has: seen here even while the engine starts and nobody reads the connection."""
    while os.getppid() == parent:
        time.sleep(1.0)
    _end()


def _end() -> None:
    """End this process and what vLLM started under it: it leads a session."""
    print("the sampler's process is gone", flush=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serve one sampler. vLLM's own output goes to where standard output was sent, which is a log file."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    try:
        loop = EngineLoop(connection, connection.recv())
        loop.run()
        loop.engine.engine_core.shutdown()
        os._exit(0)  # the interpreter's own end can take long with vLLM's threads
    except EOFError:
        _end()


if __name__ == "__main__":
    main()
