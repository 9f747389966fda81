"""The recipe as people start it: ``grpoflow run`` against a local Prefect server that it starts and ends itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.service import Service, healthy
from pipeline.rundir import RunPaths
from tests.tiny import tiny_recipe

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A state folder and a root of its own, and a server on a free port that stays up for these tests."""
    folder = tmp_path_factory.mktemp("prefect")
    service = Service(folder / "home")
    with service._exclusive():
        service._save({"port": 0})
        service.start_server()
    yield folder, service
    service.down(say=lambda line: None)
    assert not healthy(service.url)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_server_for_the_length_of_a_command_ends_with_the_last_one_that_uses_it(tmp_path, monkeypatch, taken_over):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    first, second = Service(tmp_path), Service(tmp_path)
    with second._exclusive():
        second._save({"port": 0})
    one, two = first.server(), second.server()
    url = one.__enter__()
    try:
        assert two.__enter__() == url
        one.__exit__(None, None, None)
        assert healthy(url)  # the second command works on
        if taken_over:  # as `grpoflow up` does
            second._save({**second.state(), "passing": False})
        two.__exit__(None, None, None)
        assert healthy(url) is taken_over
    finally:
        first.down(say=lambda line: None)
    assert not healthy(url)


def command(folder, *arguments):
    changes = [part for change in tiny_recipe(folder) for part in ("--set", change)]
    environment = {**os.environ, "GRPOFLOW_HOME": str(folder / "home")}
    environment.pop("PREFECT_API_URL", None)
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", *changes, "--root", str(folder / "runs"), "--run-id", "tiny", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def flow_runs(service):
    return ask(service, "flow_runs")


def ask(service, what):
    """Read from the server in a process of its own: this one must not be bound to its address."""
    code = (
        "import asyncio, json\nfrom prefect.client.orchestration import get_client\n"
        "async def main():\n"
        "    async with get_client() as client:\n"
        f"        rows = await client.read_{what}()\n"
        "        print(json.dumps([row.model_dump(mode='json') for row in rows]))\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=service.environment(), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_killed_run_is_continued_by_the_same_command_and_prefect_shows_both(place):
    folder, service = place
    paths = RunPaths(folder / "runs", "tiny")
    first = command(folder)
    wait_for(lambda: paths.result_file("round-01/step-0001/rollout").is_file(), first)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done_before = sorted(path for path in paths.directory.rglob("result.json"))
    stamps = [path.stat().st_mtime_ns for path in done_before]
    second = command(folder)
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output
    assert [path.stat().st_mtime_ns for path in done_before] == stamps
    assert "stages were complete and are reused" in output
    assert "grpoflow sql" in output
    states = sorted(run["state"]["type"] for run in flow_runs(service))
    assert states == ["COMPLETED", "RUNNING"]  # the killed one is a zombie until `up` reconciles it
    assert service._in_prefect("reconcile") == 1
    assert sorted(run["state"]["type"] for run in flow_runs(service)) == ["COMPLETED", "CRASHED"]
    keys = {artifact["key"] for artifact in ask(service, "artifacts")}
    assert {"evaluation-final", "round-01", "round-02", "report"} <= keys


def test_a_run_started_by_hand_is_cancelled_on_the_page_and_goes_on_with_the_same_command(place):
    folder, service = place
    paths = RunPaths(folder / "runs", "by-hand")
    changes = ["--run-id", "by-hand", "--set", "warm_start.steps=1000", "--set", "warm_start.checkpoint_every=100"]
    run = command(folder, *changes)
    wait_for(lambda: paths.result_file("select").is_file(), run)
    [flow_run] = [row for row in flow_runs(service) if row["name"].endswith("by-hand")]
    body = json.dumps({"state": {"type": "CANCELLING"}}).encode()
    urllib.request.urlopen(
        urllib.request.Request(
            f"{service.url}/flow_runs/{flow_run['id']}/set_state", body, {"Content-Type": "application/json"}
        )
    ).close()
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 130, output
    assert "the same command continues where it was" in output
    assert "Traceback" not in output
    states = {row["id"]: row["state"]["type"] for row in flow_runs(service)}
    assert states[flow_run["id"]] == "CANCELLED"
    again = command(folder, *changes)
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert "stages were complete and are reused" in output
    assert {row["state"]["type"] for row in flow_runs(service) if row["name"].endswith("by-hand")} == {
        "CANCELLED",
        "COMPLETED",
    }


def test_a_mistake_in_a_parameter_fails_in_the_first_second_with_the_fields_name(place):
    folder, _ = place
    run = command(folder, "--set", "grpo.group_sze=3")
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "grpo.group_sze" in output
    assert "group_size" in output
    assert "Traceback" not in output


def test_a_stage_that_refuses_its_input_says_so_in_one_line(place):
    folder, _ = place
    file = folder / "gold.jsonl"
    file.write_text(
        "".join(json.dumps({"problem": f"say the number {n}", "answer": "\\frac{"}) + "\n" for n in range(20))
    )
    run = command(folder, "--run-id", "gold", "--set", f'data.sources=[{{name="file", path="{file}"}}]')
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 2
    assert "Traceback" not in output
    assert [line[:30] for line in output.splitlines() if "max_gold_rejects" in line] == [
        "grpoflow: source 'gold': 20 of"
    ]


def test_failures_warnings_and_finished_reports_are_posted_to_the_address(place):
    folder, service = place
    with inbox() as (url, posts):
        assert service._in_prefect("notify", text=url) == 3
        file = folder / "empty-gold.jsonl"
        file.write_text(json.dumps({"problem": "say one", "answer": ""}) + "\n")
        for changes in (
            ["--run-id", "failing", "--set", f'data.sources=[{{name="file", path="{file}"}}]'],
            ["--run-id", "warning", "--set", "guards.entropy=100.0"],
        ):
            command(folder, *changes).communicate(timeout=240)
        code = "import sys; from flows.deployed import report; report(root=sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder / "runs")],
            env=service.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        for words in ("failing: Failed", "warning: round-01/step-0001", "report: Completed"):
            wait_for(lambda words=words: any(words in post["text"] for post in posts), seconds=60)
        assert all(post["text"].startswith("grpoflow: ") for post in posts)
        assert service._in_prefect("notify", text="") == 0  # taken back


@contextmanager
def inbox():
    """A local web server: its address, and the JSON bodies posted to it."""
    posts = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", posts
    finally:
        server.shutdown()
        server.server_close()


def wait_for(condition, child=None, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert child is None or child.poll() is None, child.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
