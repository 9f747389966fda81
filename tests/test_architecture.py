"""The one-line rule of imports, and what may not be loaded when."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pipeline", "data", "rewards", "eval", "stages", "flows")


def test_imports_only_go_right():
    done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True, env=_environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_root_package_is_ours(package):
    # The names are generic: another distribution could bring a package called `data`.
    assert Path(import_module(package).__file__).is_relative_to(ROOT)


@pytest.mark.parametrize("module", ["pipeline.types", "pipeline.config", "flows.cli", "flows.runs", "flows.console"])
def test_light_modules_load_no_heavy_library(module):
    code = (
        f"import sys, {module}; print(*[m for m in ('torch', 'vllm', 'prefect', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_loads_no_heavy_library():
    code = (
        "import sys\nfrom flows import cli\nsys.argv = ['grpoflow', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print('loaded:', *[m for m in ('torch', 'vllm', 'prefect') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "resume" in done.stdout or "run" in done.stdout
    assert done.stdout.strip().splitlines()[-1] == "loaded:"


def test_the_deployed_flows_load_no_torch():
    code = "import sys, flows.deployed; print(*[m for m in ('torch', 'vllm', 'stages') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def _environment():
    import os

    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
