"""Machines that join a run: who may, how long they are waited for, and what is said when something is missing."""

from __future__ import annotations

import threading
from multiprocessing.connection import Client

import pytest

from pipeline.backends import nodes
from pipeline.backends.nodes import SECRET, Launch, free_port, gather_nodes, host_and_port, join, node_key
from pipeline.config import load_recipe

LAUNCH = Launch("tests.dying_rank", 1, {"A": "b"}, nodes=2, master=("127.0.0.1", 1))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "a secret of the tests")


def test_only_who_knows_the_secret_is_told_what_to_start() -> None:
    address = ("127.0.0.1", free_port("127.0.0.1"))
    answers = {}

    def knock(key: bytes) -> None:
        while True:
            try:
                with Client(address, authkey=key) as connection:
                    answers[key] = connection.recv()
                return
            except ConnectionRefusedError:
                continue
            except Exception as error:
                answers[key] = error
                return

    def knock_twice() -> None:
        for key in (b"another secret 1", node_key()):
            knock(key)

    thread = threading.Thread(target=knock_twice)
    thread.start()
    others = gather_nodes(f"{address[0]}:{address[1]}", LAUNCH)
    thread.join()
    assert len(others) == 1 and isinstance(answers[b"another secret 1"], Exception)
    told = answers[node_key()]
    assert (told.node, told.nodes, told.module, told.environment) == (1, 2, "tests.dying_rank", {"A": "b"})


def test_machines_that_never_join_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=r"learner.nodes is 2 but only 0 others joined .*grpoflow join 127.0.0.1"):
        gather_nodes(f"127.0.0.1:{free_port('127.0.0.1')}", LAUNCH)


def test_a_missing_secret_and_a_bad_address_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("node-1", ":29500", "node-1:http", "node-1:99999"):
        with pytest.raises(ValueError, match="is no HOST:PORT"):
            host_and_port(wrong)
    assert host_and_port("node-1:29500") == ("node-1", 29500)
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(ValueError, match=f"{SECRET} has 5 characters, expected at least 16"):
        join("127.0.0.1:29500")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["learner.nodes=2"], "learner.backend = 'deepspeed' .* learner.rendezvous"),
        (["learner.nodes=2", "learner.backend=deepspeed"], "learner.rendezvous"),
        (["learner.nodes=2", "learner.backend=deepspeed", "learner.ranks=3", "learner.rendezvous=a:1"], "multiple"),
        (["learner.nodes=2", "learner.backend=deepspeed", "learner.ranks=2", "learner.rendezvous=a"], "HOST:PORT"),
    ],
)
def test_a_recipe_for_several_machines_is_whole(overrides: list[str], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        load_recipe("embedded", overrides)
