"""Postgres behind the Prefect server, in place of SQLite: ``PREFECT_API_DATABASE_CONNECTION_URL=postgresql+asyncpg://…``."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.service import Service, free_port
from pipeline.rundir import RunPaths
from tests.test_prefect import command, flow_runs

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


def binary(name):
    """A program of the newest Postgres, which Debian keeps out of PATH; skips the test when there is none."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    found = shutil.which(name) or (str(places[-1]) if places else None)
    if not found:
        pytest.skip(f"{name} is not installed: apt-get install postgresql")
    return found


@pytest.fixture
def database(tmp_path, monkeypatch):
    """The address of a database of a Postgres on a free port, which is stopped after the test."""
    initdb, control = binary("initdb"), binary("pg_ctl")
    user = {"user": "postgres"} if os.geteuid() == 0 else {}  # Postgres refuses to run as root
    place = Path(subprocess.check_output(["mktemp", "-d"], text=True, **user).strip())
    data, port = place / "data", free_port(0)
    run = {"check": True, "stdout": subprocess.DEVNULL, "cwd": place, **user}
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={place} -c fsync=off"
    subprocess.run([initdb, "-D", data, "-U", "prefect", "--auth=trust"], **run)
    subprocess.run([control, "-D", data, "-l", place / "log", "-w", "-o", options, "start"], **run)
    url = f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", url)
    yield [binary("psql"), "-h", "127.0.0.1", "-p", str(port), "-U", "prefect", "-d", "postgres", "-Atc"]
    subprocess.run([control, "-D", data, "-m", "immediate", "stop"], **run)
    shutil.rmtree(place, ignore_errors=True)


def test_a_run_is_shown_by_a_server_whose_database_is_postgres(database, tmp_path):
    service = Service(tmp_path / "home")
    with service._exclusive():
        service._save({"port": 0})
        service.start_server()
    try:
        run = command(tmp_path)
        output, _ = run.communicate(timeout=400)
        assert run.returncode == 0, output
        assert RunPaths(tmp_path / "runs", "tiny").result_file("evaluate/final").is_file()
        assert [run["state"]["type"] for run in flow_runs(service)] == ["COMPLETED"]
        count = subprocess.check_output(
            [*database, "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'"], text=True
        )
        assert count.strip() == "1"
        assert not (tmp_path / "home" / "prefect" / "prefect.db").exists()
    finally:
        service.down(say=lambda line: None)
