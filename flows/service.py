"""The local Prefect server and worker: ``up``, ``down``, ``doctor``, and a server for the length of one command.

State is one folder, ``.grpoflow`` beside the code (or $GRPOFLOW_HOME): Prefect's home with its SQLite database, log files,
and ``service.json`` with the processes that ``up`` started, so that ``down`` ends exactly those.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.secret import without_credentials
from pipeline.rundir import write_atomic

PROJECT = Path(__file__).resolve().parent.parent
POOL, QUEUE = "grpoflow", "runs"
DEFAULT_PORT = 4200
SERVER_SECONDS = 150
"""A fresh database is migrated first: 25 s on two busy cores."""
GRACE_SECONDS = 40
"""How long cancelled flow runs are given; the worker itself kills after 30 s."""


class Service:
    """The processes behind one state folder."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = (home or Path(os.environ.get("GRPOFLOW_HOME", PROJECT / ".grpoflow"))).resolve()

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def state_file(self) -> Path:
        return self.home / "service.json"

    def state(self) -> dict[str, Any]:
        """What ``up`` wrote down: port, and the processes by name. Empty when nothing was started."""
        try:
            return json.loads(self.state_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}

    def _save(self, state: dict[str, Any]) -> None:
        write_atomic(self.state_file, json.dumps(state, indent=1))

    def process(self, name: str) -> int | None:
        """The pid of a process that we started and that is still the same one, or None."""
        entry = self.state().get(name)
        return entry["pid"] if entry and started_at(entry["pid"]) == entry["started"] else None

    @property
    def url(self) -> str:
        """The API: the user's PREFECT_API_URL where set, else the local server's."""
        return os.environ.get("PREFECT_API_URL") or f"http://127.0.0.1:{self.state().get('port', DEFAULT_PORT)}/api"

    def environment(self, url: str | None = None) -> dict[str, str]:
        """The environment of server, worker and flow: no telemetry, our home, heartbeats every 30 s."""
        return {
            **os.environ,
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": url or self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_LOGGING_EXTRA_LOGGERS": "",
            "PREFECT_CLI_PROMPT": "false",
        }

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Two commands at once take turns: a kernel lock, which a dead one lets go."""
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # -- server ---------------------------------------------------------------------------------------------------

    def start_server(self) -> bool:
        """Start the server unless it runs; True when this call started it."""
        if self.process("server") and healthy(self.url):
            return False
        if self.process("server"):
            end_process(self.process("server"), seconds=10)
        port = free_port(self.state().get("port", DEFAULT_PORT))
        url = f"http://127.0.0.1:{port}/api"
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self._start("server", command, self.environment(url), port=port)
        deadline = time.monotonic() + SERVER_SECONDS
        while not healthy(url):
            if self.process("server") is None or time.monotonic() > deadline:
                last = tail(self.home / "server.log")
                self._stop("server", seconds=5)
                raise RuntimeError(f"the Prefect server did not start; {self.home / 'server.log'} ends with: {last}")
            time.sleep(0.25)
        return True

    @contextlib.contextmanager
    def server(self) -> Iterator[str]:
        """The API's address for the length of a command: the server that answers, else one of our own.

        Ours ends with the last command that uses it, which holds a kernel lock as long, unless `up` has taken it over.
        """
        if os.environ.get("PREFECT_API_URL"):
            if not healthy(self.url):
                raise ValueError(
                    f"PREFECT_API_URL is {self.url} and nothing answers there: start that server, unset the variable "
                    f"(grpoflow then starts its own), or add --no-prefect"
                )
            yield self.url
            return
        with self._exclusive():
            if self.start_server():
                self._save({**self.state(), "passing": True})
            users = (self.home / ".users").open("w")
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield self.url
        finally:
            with users, self._exclusive(), contextlib.suppress(BlockingIOError):  # another command uses it
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.state().get("passing"):
                    self._stop("server", seconds=20)

    def _start(self, name: str, command: Sequence[str], environment: dict[str, str], **state: Any) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(  # own session: Ctrl-C in the terminal that started it does not end it
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=PROJECT,
                start_new_session=True, preexec_fn=reset_signals,
            )  # fmt: skip
        self._save({**self.state(), **state, name: {"pid": child.pid, "started": started_at(child.pid)}})

    def _stop(self, name: str, seconds: float) -> bool:
        pid = self.process(name)
        if pid is not None:
            end_process(pid, seconds)
        state = self.state()
        state.pop(name, None)
        if name == "server":
            state.pop("passing", None)
        self._save(state)
        return pid is not None

    # -- up and down ----------------------------------------------------------------------------------------------

    def up(self, say: Any = print, *, slots: int | None = None, notify: str | None = None) -> None:
        """Server, pool, deployments, the watch for dead runs, a worker. A second call finds what runs and says so.

        ``slots`` runs work at a time and later ones queue (1 unless it was set before); ``notify`` is an address that is
        told of failures and reports, "off" ends that. With PREFECT_API_URL the server is that one, and only a worker starts.
        """
        with self._exclusive():
            given = bool(os.environ.get("PREFECT_API_URL"))
            if given and not healthy(self.url):
                raise ValueError(
                    f"PREFECT_API_URL is {self.url} and nothing answers there: start that server, or unset it"
                )
            how = "given by PREFECT_API_URL" if given else "started" if self.start_server() else "was running"
            say(f"server   {without_credentials(self.url.removesuffix('/api'))} ({how})")
            self._prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
            slots = slots or self.state().get("slots", 1)
            self._save({**self.state(), "slots": slots, "passing": False})  # the server stays now, whoever started it
            dead = self._in_prefect("prepare", slots)
            say(f"reconciled {dead} runs of processes that are gone; {slots} at a time, later ones queue")
            self._prefect("deploy", "--all", "--prefect-file", str(PROJECT / "prefect.yaml"))
            say("deployed recipe/full, recipe/smoke, evaluate/report")
            if notify is not None:
                told = self._in_prefect("notify", text="" if notify == "off" else notify)
                say("notices  of failed runs, warnings and reports are posted" if told else "notices  are off")
            if self.process("worker"):
                say("worker   was running")
            else:
                command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
                self._start("worker", command, self.environment())
                say(f"worker   started; its log: {self.home / 'worker.log'}")

    def down(self, say: Any = print) -> None:
        """Cancel live runs and wait for them, then end the worker, then the server: only those that ``up`` started."""
        with self._exclusive():
            ours = self.process("server") or self.process("worker")
            if ours and healthy(self.url):
                live = self._in_prefect("cancel", GRACE_SECONDS)
                if live:
                    say(f"cancelled {live} runs; `grpoflow run --run-id ID` continues them")
            elif ours is None:
                say("nothing was running")
            for name, seconds in (("worker", GRACE_SECONDS), ("server", 20)):
                if self._stop(name, seconds):
                    say(f"{name} stopped")

    def doctor(self, root: Path) -> list[tuple[str, bool, str]]:
        """(what, all right, details) of server, worker, database, stale runs and the run directories' locks."""
        rows = [("server", healthy(self.url), without_credentials(self.url))]
        worker = self.process("worker")
        rows.append(("worker", worker is not None, f"pid {worker}" if worker else "not running: grpoflow up"))
        database = self.home / "prefect" / "prefect.db"
        if database.is_file():  # with another database or another machine's server there is none
            size = sum(p.stat().st_size for p in database.parent.glob("prefect.db*"))
            rows.append(("database", size < 2**31, f"{size / 2**20:.1f} MiB at {database}"))
        if rows[0][1]:
            stale = self._in_prefect("stale")
            rows.append(("stale runs", stale == 0, f"{stale}" + (": grpoflow up marks them crashed" if stale else "")))
        for lock in sorted(root.glob("*/.lock")):
            holder = lock_holder(lock)
            if holder:
                rows.append((f"run {lock.parent.name}", True, f"at work: {holder}"))
        return rows

    def _prefect(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(
            command, env=self.environment(), cwd=PROJECT, capture_output=True, text=True, timeout=180, check=False
        )
        if done.returncode:
            text = (done.stderr + done.stdout).strip()[-800:]
            raise RuntimeError(f"prefect {' '.join(arguments[:2])} failed: {text}")
        return done.stdout

    def _in_prefect(self, action: str, number: float = 0, text: str = "") -> int:
        """Run one of flows.housekeeping's actions in a process with our environment; returns its count."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.housekeeping", action, str(number)], env=self.environment(), input=text,
            cwd=PROJECT, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"Prefect housekeeping ({action}) failed: {done.stderr.strip()[-800:]}")
        return int(done.stdout.strip().splitlines()[-1])


# -- processes ----------------------------------------------------------------------------------------------------


def healthy(url: str) -> bool:
    """Whether a Prefect API answers there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def free_port(wanted: int) -> int:
    """The wanted port where it is free on loopback, else any free one."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise RuntimeError("no free port on 127.0.0.1")


def started_at(pid: int) -> str | None:
    """The kernel's start time of a process (so that a pid used again is not mistaken for it); None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def end_process(pid: int | None, seconds: float) -> None:
    """SIGTERM to the process, SIGKILL to its whole session after ``seconds``; returns once it is gone."""
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while started_at(pid) is not None and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reset_signals() -> None:
    """A shell's `&` starts children with SIGINT ignored, and a worker that inherits this hangs when it is stopped."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def lock_holder(file: Path) -> str | None:
    """Who holds a run's lock, or None."""
    with file.open("r", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip() or "a process that has just started"
    return None


def tail(file: Path, lines: int = 5) -> str:
    """The last lines of a log, in one."""
    if not file.is_file():
        return "(no log)"
    return " | ".join(file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:])
