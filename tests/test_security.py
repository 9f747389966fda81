"""What an operator relies on: no open door, no secret written down, no code out of model files, no way out of the runs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from flows.console import Display
from flows.execute import execute
from flows.runs import open_run
from flows.service import Service
from pipeline import store
from pipeline.backends.nodes import Launch
from pipeline.config import ModelConfig, load_recipe
from pipeline.config.secret import without_credentials
from pipeline.models import check_folder
from pipeline.rundir import RunPaths, stage_keys
from pipeline.schema import TABLES
from tests.commands import refused
from tests.listening import beyond_loopback, family, listening
from tests.tiny import tiny_recipe

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    path for room in ("pipeline", "data", "rewards", "eval", "stages", "flows") for path in (ROOT / room).rglob("*.py")
]
SECRET = "sentinel5ecretValue"


# -- nothing listens beyond loopback ---------------------------------------------------------------------------------


def test_the_kernel_tables_are_read_right():
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("", 0)) as far:
        found = listening([os.getpid()])
        assert f"127.0.0.1:{near.getsockname()[1]}" in found
        assert beyond_loopback(found) == [f"0.0.0.0:{far.getsockname()[1]}"]


def test_ranks_of_one_machine_and_their_launcher_listen_on_loopback():
    # torch alone binds the launcher's two stores to every address, and unpickles what comes.
    child = Launch("tests.listening", 1, {"OMP_NUM_THREADS": "1"}).start(subprocess.PIPE)
    output = child.communicate(timeout=120)[0].decode()
    addresses = re.findall(r"\S+:\d+", output.strip().splitlines()[-1])
    assert len(addresses) >= 2, output
    assert beyond_loopback(addresses) == []


def test_the_prefect_server_is_started_on_loopback(tmp_path, monkeypatch):
    commands = []

    def start(self, name, command, environment, **state):
        commands.append((command, environment))
        raise RuntimeError("seen enough")

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(Service, "_start", start)
    with pytest.raises(RuntimeError, match="seen enough"):
        Service(tmp_path).start_server()
    command, environment = commands[0]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert environment["PREFECT_API_URL"].startswith("http://127.0.0.1:")


def test_no_source_names_every_address_of_the_machine():
    assert [path.name for path in SOURCES if re.search(r"0\.0\.0\.0|\bINADDR_ANY\b", path.read_text())] == []


# -- no secret is written down ---------------------------------------------------------------------------------------


class Watcher:
    """An observer that notes where this process and its children listen while a step is at work."""

    def __init__(self):
        self.addresses = []

    def progress(self, key, done, total, note): ...
    def end(self, key, result, *, reused): ...
    def evaluated(self, name, metrics): ...

    def step(self, row):
        self.addresses += listening(family(os.getpid()))


def test_a_run_opens_no_door_and_writes_no_secret(tmp_path, monkeypatch, capfd):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GRPOFLOW_NODE_KEY"):
        monkeypatch.setenv(name, SECRET)
    before = set(listening(family(os.getpid())))
    recipe, paths = open_run(
        "embedded", [*tiny_recipe(tmp_path), "grpo.rounds=1", "grpo.steps=1"], "tiny", None, tmp_path
    )
    watcher = Watcher()
    execute(recipe, paths, observers=(watcher,), display=Display(len(stage_keys(recipe))))
    assert set(watcher.addresses) <= before
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    for table in TABLES:  # Parquet is compressed: its texts are read
        assert SECRET not in json.dumps(store.read(paths, table).to_pylist(), default=str)
    captured = capfd.readouterr()
    assert SECRET not in captured.out + captured.err


@pytest.mark.parametrize(
    ("change", "field", "hidden"),
    [
        ('sampler.vllm.urls=["http://me:pa55word@host:8000"]', "sampler.vllm.urls.0", "pa55word"),
        ('data.sources=[{name="file", path="https://t0ken@host/x.jsonl"}]', "data.sources.0.path", "t0ken"),
        ("model.name=https://host/m?X-Amz-Signature=abcdef", "model.name", "abcdef"),
        ("model.revision=hf_abcdefghijklmnopqrstuv", "model.revision", "hf_abc"),
        (f"name={SECRET}", "name", SECRET),
        (f'rewards.functions={{{SECRET}="a:b"}}', "rewards.functions", SECRET),
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(change, field, hidden, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    line = refused(monkeypatch, capsys, "run", "--no-prefect", "--root", tmp_path, "--set", change)
    assert f"recipe embedded: {field} holds" in line
    assert hidden not in line
    assert not list(tmp_path.iterdir())


def test_what_only_looks_a_little_like_a_secret_is_taken(monkeypatch):
    monkeypatch.setenv("SHORT_TOKEN", "smoke")
    recipe = load_recipe("smoke", ['sampler.vllm.urls=["http://10.0.0.7:8000"]', "model.name=me/sk-model", "name=a@b"])
    assert recipe.sampler.vllm.urls == ("http://10.0.0.7:8000",)


def test_the_password_of_a_prefect_server_is_not_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:{SECRET}@127.0.0.1:9/api")
    line = refused(monkeypatch, capsys, "run", "--recipe", "smoke", "--root", tmp_path)
    assert "http://***@127.0.0.1:9/api" in line and SECRET not in line
    assert [SECRET in row[2] for row in Service(tmp_path / "home").doctor(tmp_path)].count(True) == 0
    assert without_credentials("see https://user@host/a and http://host") == "see https://***@host/a and http://host"


# -- model files are data, not code -----------------------------------------------------------------------------------


def test_a_model_of_pickled_weights_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
    with pytest.raises(ValueError, match=r"no \*\.safetensors there, and other weight formats can run code"):
        check_folder(tmp_path, ModelConfig(name=str(tmp_path)))


def test_nothing_of_ours_unpickles_weights_or_trusts_code_of_a_model():
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in SOURCES}
    # The two that unpickle speak to a process of their own: the user's function.
    assert [name for name, text in texts.items() if re.search(r"\bpickle\.loads?\(", text)] == [
        "rewards/user_functions.py"
    ]
    for name, text in texts.items():
        assert "trust_remote_code=True" not in text, name
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, f"{name}: {call}"
        for call in re.findall(r"AutoModel\w*\.from_pretrained\((.*?)\n\s*\)", text, re.DOTALL):
            assert "use_safetensors=True" in call or "**options" in call, f"{name}: {call}"


def test_code_that_comes_with_a_model_runs_only_where_the_recipe_says_so():
    assert ModelConfig().trust_remote_code is False
    from pipeline.config import recipe_names

    assert [name for name in recipe_names() if load_recipe(name).model.trust_remote_code] == []


# -- names stay inside the folder of runs -------------------------------------------------------------------------------

OUTSIDE = ["../x", "/tmp/x", "a/b", "..", ".hidden", "x\n", "-x", ""]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_run_id_that_leaves_the_folder_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="run id"):
        RunPaths(tmp_path, name)


@pytest.fixture
def root(tmp_path):
    """A folder of runs beside which another folder looks like a run."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "recipe.json").write_text('{"run_id": "x", "recipe": {}, "digest": ""}')
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def stop(*_):
    raise ValueError("no model is needed to see where the run would be")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--no-prefect", "--run-id", "../x"],
        ["run", "--no-prefect", "--run-id", "../x", "--resume-from", "reject"],
        ["run", "--no-prefect", "--set", "name=../x"],
        ["status", "../x"],
        ["report", "../x"],
        ["compare", "../x", "../x"],
        ["sql", "--run", "../x", "SELECT 1"],
        ["export", "../x", "--out", "set.jsonl"],
        ["evaluate", "--model", "nowhere", "--benchmark", "../../x"],
        ["evaluate", "--model", "nowhere", "--benchmark", "mgsm/../../x"],
    ],
    ids=" ".join,
)
def test_no_command_leaves_the_folder_of_runs(arguments, root, monkeypatch, capsys):
    monkeypatch.chdir(root.parent)
    monkeypatch.setattr("flows.evaluate_model._evaluate", stop)
    before = sorted(root.parent.rglob("*"))
    refused(monkeypatch, capsys, *arguments, "--root", "runs")
    assert [path for path in sorted(root.parent.rglob("*")) if path not in before and root not in path.parents] == []


def test_a_checkpoint_is_found_by_the_names_that_stages_give(tmp_path):
    paths = RunPaths(tmp_path, "mine")
    paths.directory.mkdir()
    paths.recipe_file.write_text('{"parent": null}')
    for name in ("../../x", "/etc", "round-01/../../x", ""):
        with pytest.raises((ValueError, FileNotFoundError), match="checkpoint"):
            paths.find_checkpoint(name)


def test_a_query_reads_the_store_and_nothing_else(root, monkeypatch, capsys):
    monkeypatch.chdir(root.parent)
    (root.parent / "key.csv").write_text("a\n1\n")
    for query in ("FROM read_csv('key.csv')", "FROM read_text('/etc/hostname')", "FROM glob('/etc/*')"):
        assert "grpoflow:" in refused(monkeypatch, capsys, "sql", query, "--root", "runs")
    assert "folder of runs" in refused(monkeypatch, capsys, "sql", "SELECT 1", "--out", "runs/x.csv", "--root", "runs")
