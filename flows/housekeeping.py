"""What ``up``, ``down`` and ``doctor`` ask of the Prefect server; a process of its own, so that the environment holds.

``python -m flows.housekeeping prepare | cancel | stale`` prints one number.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.states import Cancelling, Crashed

from flows.service import started_at

WATCH = "grpoflow: a run without heartbeats has crashed"
HEARTBEATS = timedelta(seconds=180)
"""Six missed heartbeats of 30 s; less was seen to call healthy runs dead."""
LIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


async def prepare(client: PrefectClient) -> int:
    """Make the watch for dead runs, and mark as crashed those whose process on this machine is gone."""
    await watch_heartbeats()
    dead = [run for run in await live_runs(client) if is_gone(run)]
    for run in dead:
        await client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
    return len(dead)


async def cancel(client: PrefectClient, seconds: float) -> int:
    """Cancel every live run and wait until none is left, at most ``seconds``; then what is gone is marked crashed."""
    runs = await live_runs(client)
    for run in runs:
        if is_gone(run):
            continue
        if (pid := own_process(run)) is not None:
            os.kill(pid, signal.SIGINT)  # no worker watches over it: it stops itself, resumably, as after Ctrl-C
        else:
            await client.set_flow_run_state(run.id, Cancelling(message="grpoflow down"))
    for _ in range(int(seconds)):
        if not [run for run in await live_runs(client) if not is_gone(run)]:
            break
        await asyncio.sleep(1)
    for run in await live_runs(client):
        if is_gone(run):
            await client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
    return len(runs)


async def stale(client: PrefectClient) -> int:
    """How many runs are called live while their process is gone."""
    return sum(is_gone(run) for run in await live_runs(client))


async def live_runs(client: PrefectClient) -> list[FlowRun]:
    """All runs that are pending, running or cancelling."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=LIVE))
    return await client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state))


def is_gone(run: FlowRun) -> bool:
    """True when the run's process was on this machine and no longer is; of other machines nothing is known."""
    for tag in run.tags:
        if tag.startswith("process:"):
            _, host, pid, started = tag.split(":", 3)
            return host == socket.gethostname() and started_at(int(pid)) != started
    if not run.infrastructure_pid:
        return False
    host, _, pid = run.infrastructure_pid.rpartition(":")
    return host == socket.gethostname() and pid.isdigit() and started_at(int(pid)) is None


def own_process(run: FlowRun) -> int | None:
    """The pid of a run that `grpoflow run` carries out in its own process on this machine."""
    for tag in run.tags:
        if tag.startswith(f"process:{socket.gethostname()}:"):
            return int(tag.split(":")[2])
    return None


async def watch_heartbeats() -> None:
    """One automation, made once: a run that was heard of and then falls silent is marked crashed."""
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    automation = Automation(
        name=WATCH,
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *ends},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=HEARTBEATS,
        ),
        actions=[
            ChangeFlowRunState(
                name=None, state=StateType.CRASHED, message="no heartbeat for three minutes", force=False
            )
        ],
    )
    try:
        await Automation.aread(name=WATCH)
    except ValueError:
        await automation.acreate()


async def main(action: str, seconds: float) -> Any:
    async with get_client() as client:
        if action == "prepare":
            return await prepare(client)
        return await (cancel(client, seconds) if action == "cancel" else stale(client))


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], float(sys.argv[2]))))
