"""Cost targets and deadlines: the run stops before it overspends, and a hung stage ends."""

import subprocess
import sys
import time

import pytest

from flows.deadline import Deadline
from flows.runs import open_run, read_recipe
from pipeline import store
from pipeline.config.guards import CostsConfig
from pipeline.costs import Meter, folder_bytes
from pipeline.events import Event, RunStopped
from pipeline.rundir import RunPaths, locked
from pipeline.types import StageResult
from tests.synthetic_run import synthetic_run

LATE = Event("timeouts.sft", "error", "timeouts.sft = 0.2: stage sft was ended", 0.2, 0.2)


def test_a_stage_that_would_go_over_the_seconds_is_not_begun(tmp_path):
    meter = Meter(CostsConfig(seconds=100.0), RunPaths(tmp_path, "run"))
    for key, seconds in (("sft", 50.0), ("round-01/step-0001/rollout", 20.0), ("round-01/step-0001/reward", 2.0)):
        meter.complete(StageResult(key, seconds=seconds), new=False)
    meter.check("round-01/step-0002/rollout")  # 72 + 20 = 92
    assert meter.seconds_left() == 28.0
    meter.complete(StageResult("round-01/step-0002/rollout", seconds=18.0), new=True)
    with pytest.raises(RunStopped, match=r"costs\.seconds = 100: 90 s are spent, and .*/rollout takes about 18 s more"):
        meter.check("round-01/step-0003/rollout")
    meter.check("round-01/step-0003/reward")  # 90 + 2


def test_completions_that_might_go_over_the_tokens_are_not_sampled(tmp_path):
    paths = synthetic_run(tmp_path, problems=4, samples=4)
    # 6 training steps x 4 problems x 4, and 4 evaluations x 4 problems x 5: 176 completions of 3 tokens
    meter = Meter(CostsConfig(tokens=600), paths)
    meter.before_sampling("reject", 9, 8)  # 528 + 72 = 600
    meter.sampled(10)
    with pytest.raises(RunStopped, match=r"costs\.tokens = 600: 538 are sampled, and the next 8 .* may have 64"):
        meter.before_sampling("reject", 8, 8)


def test_a_stage_that_would_fill_the_disk_is_not_begun(tmp_path):
    paths = RunPaths(tmp_path, "run")
    meter = Meter(CostsConfig(disk_gb=1e-6), paths)  # 1,000 bytes
    (paths.directory / "checkpoints").mkdir(parents=True)
    meter.check("sft")
    (paths.directory / "checkpoints" / "one").write_bytes(b"x" * 400)
    (paths.directory / "link").symlink_to(sys.executable)
    meter.complete(StageResult("sft"), new=True)
    assert folder_bytes(paths.directory) == 400
    meter.check("sft")  # 400 + 400
    (paths.directory / "two").write_bytes(b"x" * 300)
    meter.check("round-01/step-0001/rollout")
    with pytest.raises(RunStopped, match=r"costs\.disk_gb = 1e-06: 7e-07 GB are spent, and sft writes about 4e-07 GB"):
        meter.check("sft")


def test_a_stage_past_its_deadline_is_ended_and_one_in_time_is_not(tmp_path):
    deadline = Deadline(RunPaths(tmp_path, "run"))
    try:
        with deadline.within("sft", 60.0, LATE):
            pass
        with pytest.raises(RunStopped, match="stage sft was ended"), deadline.within("sft", 0.05, LATE):
            time.sleep(60)
        with pytest.raises(KeyboardInterrupt), deadline.within("sft", 60.0, LATE):
            raise KeyboardInterrupt  # the user's own
    finally:
        deadline.close()


def test_a_stage_that_hangs_where_no_signal_reaches_it_is_killed_and_the_store_says_why(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom flows.deadline import Deadline\nfrom pipeline.events import Event\n"
        "from pipeline.rundir import RunPaths\n"
        "late = Event('timeouts.sft', 'error', 'timeouts.sft = 0.2: stage sft was ended', 0.2, 0.2)\n"
        "with Deadline(RunPaths(Path(sys.argv[1]), 'run'), grace=0.2).within('sft', 0.2, late):\n"
        "    sum(range(10**13))\n"  # minutes in C without a look at signals, as in a hung library call
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert done.stderr.strip() == "grpoflow: timeouts.sft = 0.2: stage sft was ended (it hung, and was killed)"
    (row,) = store.read(RunPaths(tmp_path, "run"), "events").to_pylist()
    assert (row["stage"], row["kind"], row["severity"]) == ("sft", "timeouts.sft", "error")


def test_limits_may_change_while_a_run_goes_on_and_the_store_says_so(tmp_path):
    first, paths = open_run("embedded", ["costs.tokens=1000"], None, None, tmp_path)
    second, same = open_run("embedded", ["costs.tokens=2000", "guards.kl=2.0"], None, None, tmp_path)
    assert (same.run_id, second.digest) == (paths.run_id, first.digest)
    assert read_recipe(RunPaths(tmp_path, paths.run_id)) == second
    third, _ = open_run(None, ["timeouts.rollout=60"], paths.run_id, None, tmp_path)
    assert (third.costs, third.timeouts) == (second.costs, {"rollout": 60.0})
    assert [row["message"] for row in store.read(paths, "events").to_pylist()] == [
        "costs.tokens = 2000, was 1000; guards.kl = 2.0, was 1.0", "timeouts.rollout = 60.0, was None"
    ]  # fmt: skip
    with locked(paths), pytest.raises(BlockingIOError, match="being worked on"):
        open_run(None, ["timeouts.rollout=90"], paths.run_id, None, tmp_path)
