"""One run at a time on a device."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from flows.devices import devices, devices_held
from pipeline.config import load_recipe

HOLD = """
import sys, time
from pathlib import Path
from flows.devices import devices_held
from pipeline.config import load_recipe
with devices_held(load_recipe("smoke", ["runtime.exclusive=on", "runtime.device=cpu"]), "run first", folder=Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_processor_is_shared_unless_the_recipe_says_otherwise():
    assert devices(load_recipe("smoke", ["runtime.device=cpu"])) == []
    assert devices(load_recipe("smoke", ["runtime.device=cpu", "runtime.exclusive=on"])) == ["cpu"]
    assert devices(load_recipe("smoke", ["runtime.device=cpu", "runtime.exclusive=off"])) == []


def test_a_run_waits_for_the_device_says_for_whom_and_goes_on_when_the_holder_is_killed(tmp_path):
    recipe = load_recipe("smoke", ["runtime.device=cpu", "runtime.exclusive=on"])
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "held\n"
    with (
        pytest.raises(BlockingIOError, match=f"cpu is in use by run first, pid {first.pid} on "),
        devices_held(recipe, "report", wait=False, folder=tmp_path),
    ):
        pass
    said, waiting, entered = [], threading.Event(), threading.Event()

    def say(line):
        said.append(line)
        waiting.set()

    def second():
        with devices_held(recipe, "run second", say, folder=tmp_path):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert waiting.wait(60) and not entered.is_set()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    thread.join(60)
    assert entered.is_set()
    assert len(said) == 1 and said[0].startswith(f"waiting for cpu, in use by run first, pid {first.pid} on ")
