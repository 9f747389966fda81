"""Ranks on several machines: each of the others runs ``grpoflow join HOST:PORT`` and starts its share when it is told to.

The machine of the run listens at ``learner.rendezvous`` (HOST:PORT) whenever its learner opens. A machine that joins shows
that it has the same secret, the environment variable GRPOFLOW_NODE_KEY, is told what to start, and ends it with the
connection. The ranks meet through torch's elastic launcher with its static rendezvous, by which the machine of the run
always has the first ranks, one of which writes the checkpoints. All must see the run's folder under the same name and
have the same packages. Who has the secret can run code on these machines, and what they say to one another is not
encrypted: for a network that you trust.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import IO, Any

SECRET = "GRPOFLOW_NODE_KEY"
JOIN_SECONDS = 600.0
END_SECONDS = 40.0
"""The launcher gives its ranks 30 seconds to end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a machine starts: ``ranks`` processes of ``python -m module``; those of several machines meet at the master."""

    module: str
    ranks: int
    environment: Mapping[str, str]
    nodes: int = 1
    node: int = 0
    master: tuple[str, int] = ("127.0.0.1", 0)

    def start(self, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """torch's elastic launcher, in a session of its own."""
        if self.nodes == 1:  # such ranks listen on loopback only
            where = ["pipeline.backends.launch", "--standalone", "--local-addr=127.0.0.1"]
            network = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        else:
            host, port = self.master
            where = [
                "torch.distributed.run", f"--nnodes={self.nodes}", f"--node-rank={self.node}", f"--master-addr={host}",
                f"--master-port={port}",
            ]  # fmt: skip
            network = {}
        ranks = [f"--nproc-per-node={self.ranks}", "--max-restarts=0", "-m", self.module]
        return subprocess.Popen(
            [sys.executable, "-m", *where, *ranks], stdin=subprocess.DEVNULL, stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env={**os.environ, **network, **self.environment}, start_new_session=True,
        )  # fmt: skip


def gather_nodes(rendezvous: str, launch: Launch) -> list[Connection]:
    """One connection to each other machine, which has been told to start its ranks; ``launch`` is the first's.

    RuntimeError when they have not joined in JOIN_SECONDS.
    """
    others: list[Connection] = []
    listener = Listener(host_and_port(rendezvous), authkey=node_key())
    logger.info("waiting for %d more machines: run `grpoflow join %s` there", launch.nodes - 1, rendezvous)
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        while len(others) < launch.nodes - 1:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"learner.nodes is {launch.nodes} but only {len(others)} others joined in {JOIN_SECONDS:.0f} s; run "
                    f"`grpoflow join {rendezvous}` on each of them, with the same {SECRET}"
                )
            connection = accept(listener, 1.0)
            if connection is not None:
                others.append(connection)
        for node, connection in enumerate(others, start=1):
            connection.send(replace(launch, node=node))
    except BaseException:
        for connection in others:
            connection.close()
        raise
    finally:
        listener.close()
    return others


def join(rendezvous: str) -> None:
    """Start ranks here whenever the run at ``rendezvous`` asks for them, until interrupted."""
    address, key = host_and_port(rendezvous), node_key()
    while True:
        print(f"waiting for a run at {rendezvous} that asks for this machine's ranks; Ctrl-C ends", flush=True)
        connection = _connect(address, key)
        try:
            launch: Launch = connection.recv()
        except (EOFError, OSError):
            continue  # the run gave up before all machines were there
        print(f"starting {launch.ranks} ranks as machine {launch.node + 1} of {launch.nodes}", flush=True)
        launcher = launch.start()
        try:
            while launcher.poll() is None and not connection.poll(0.5):  # nothing more is said: readable means gone
                pass
            print("the learner has closed" if connection.poll() else "the ranks have ended", flush=True)
        finally:
            connection.close()
            end(launcher)


def end(launcher: subprocess.Popen[bytes]) -> None:
    """End a launcher and its ranks."""
    with suppress(ProcessLookupError):
        launcher.terminate()
    try:
        launcher.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def accept(listener: Listener, seconds: float) -> Connection | None:
    """The next connection with the right key, or None when there is none in time."""
    inner: Any = listener._listener  # type: ignore[attr-defined]
    inner._socket.settimeout(seconds)
    try:
        return listener.accept()
    except TimeoutError:
        return None
    except (AuthenticationError, EOFError, OSError) as error:
        logger.warning("somebody without the right key tried to join: %r", error)
        return None


def node_key() -> bytes:
    """The secret that all machines share."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < 16:
        raise ValueError(
            f"the environment variable {SECRET} has {len(secret)} characters, expected at least 16, the same on every "
            f"machine of the run; make one with: python -c 'import secrets; print(secrets.token_hex())'"
        )
    return secret.encode()


def host_and_port(rendezvous: str) -> tuple[str, int]:
    """The two parts of HOST:PORT; ValueError for anything else."""
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{rendezvous!r} is no HOST:PORT: name this run's machine as the others reach it, and a free port"
        )
    return host, int(port)


def free_port(host: str) -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _connect(address: tuple[str, int], key: bytes) -> Connection:
    while True:
        try:
            return Client(address, authkey=key)
        except AuthenticationError:
            raise ValueError(
                f"the run at {address[0]}:{address[1]} has another {SECRET}: set the same one here"
            ) from None
        except (EOFError, OSError):
            time.sleep(1.0)
