"""What ``up``, ``down`` and ``doctor`` ask of the Prefect server; a process of its own, so that the environment holds.

``python -m flows.housekeeping prepare SLOTS | reconcile | notify | cancel SECONDS | stale`` prints one number; the address
to notify comes on stdin, for a command line is seen by everyone on the machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Crashed
from prefect.types import SecretDict
from pydantic import SecretStr

from flows.service import POOL, QUEUE, started_at

WATCH = "grpoflow: a run without heartbeats has crashed"
HEARTBEATS = timedelta(seconds=180)
"""Six missed heartbeats of 30 s; less was seen to call healthy runs dead."""
WEBHOOK = "grpoflow-notify"
MESSAGE = """{"text": {{ ("grpoflow: %s" ~ (" " ~ (flow_run | ui_url) if flow_run else "")) | tojson }} }"""
STATE = '" ~ flow_run.name ~ ": " ~ flow_run.state.name ~ " " ~ (flow_run.state.message or "") ~ "'
WARNING = '" ~ flow_run.name ~ ": " ~ event.payload.stage ~ ": " ~ event.payload.message ~ "'
NOTICES = {
    "grpoflow: tell of a run that failed": ({"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}, None, STATE),
    "grpoflow: tell of a finished report": ({"prefect.flow-run.Completed"}, "evaluate", STATE),
    "grpoflow: tell of a warning or a stop": ({"grpoflow.*"}, None, WARNING),
}
"""Automations by name: the events, the flow that they are of (None: any), and the words."""
LIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


async def reconcile(client: PrefectClient) -> int:
    """Mark as crashed the live runs whose process on this machine is gone; returns how many there were."""
    dead = [run for run in await live_runs(client) if is_gone(run)]
    for run in dead:
        await client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
    return len(dead)


async def set_slots(client: PrefectClient, slots: int) -> None:
    """The queue of runs lets ``slots`` of them run at a time. It counts states and keeps no leases, which expire."""
    try:
        queue = await client.read_work_queue_by_name(QUEUE, POOL)
    except ObjectNotFound:
        await client.create_work_queue(QUEUE, work_pool_name=POOL, concurrency_limit=slots)
    else:
        await client.update_work_queue(queue.id, concurrency_limit=slots)


async def cancel(client: PrefectClient, seconds: float) -> int:
    """Cancel every live run of this machine and wait until none is left, at most ``seconds``; the gone are crashed."""
    runs = [run for run in await live_runs(client) if is_here(run)]
    for run in runs:
        if is_gone(run):
            continue
        if (pid := own_process(run)) is not None and run.deployment_id is None:
            os.kill(pid, signal.SIGINT)  # no worker watches over it: it stops itself, resumably, as after Ctrl-C
        else:
            await client.set_flow_run_state(run.id, Cancelling(message="grpoflow down"))
    for _ in range(int(seconds)):
        if not [run for run in await live_runs(client) if is_here(run) and not is_gone(run)]:
            break
        await asyncio.sleep(1)
    await reconcile(client)
    return len(runs)


async def notify(url: str) -> int:
    """Post a line of text, as JSON ``{"text": …}``, to this address when a run fails, warns or stops, or a report is done.

    An empty address ends it. Returns how many automations there are now.
    """
    for name in NOTICES:
        try:
            await (await Automation.aread(name=name)).adelete()
        except ValueError:
            continue
    if not url:
        return 0
    block_id: Any = await Webhook(
        method="POST", url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"})
    ).save(WEBHOOK, overwrite=True)
    for name, (events, flow, words) in NOTICES.items():
        related: dict[str, str | list[str]] = (
            {"prefect.resource.role": "flow", "prefect.resource.name": flow} if flow else {}
        )
        trigger = EventTrigger(
            expect=events, match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(related), posture=Posture.Reactive, threshold=1, within=timedelta(0),
        )  # fmt: skip
        action = CallWebhook(block_document_id=block_id, payload=MESSAGE % words)
        await Automation(name=name, trigger=trigger, actions=[action]).acreate()
    return len(NOTICES)


async def stale(client: PrefectClient) -> int:
    """How many runs are called live while their process is gone."""
    return sum(is_gone(run) for run in await live_runs(client))


async def live_runs(client: PrefectClient) -> list[FlowRun]:
    """All runs that are pending, running or cancelling."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=LIVE))
    return await client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state))


def is_gone(run: FlowRun) -> bool:
    """True when the run's process was on this machine and no longer is; of other machines nothing is known."""
    if (signed := signature(run)) is not None:
        host, pid, started = signed
        return host == socket.gethostname() and started_at(pid) != started
    pid_text = run.infrastructure_pid or ""  # a worker's, before the flow could sign: a bare pid
    return server_is_here() and pid_text.isdigit() and started_at(int(pid_text)) is None


def is_here(run: FlowRun) -> bool:
    """Whether the run is one of this machine's."""
    signed = signature(run)
    return signed[0] == socket.gethostname() if signed else server_is_here()


def own_process(run: FlowRun) -> int | None:
    """The pid of a run at work in a process on this machine."""
    signed = signature(run)
    return signed[1] if signed and signed[0] == socket.gethostname() else None


def signature(run: FlowRun) -> tuple[str, int, str] | None:
    """Host, pid and start time of the run's process, as the flow has signed them in a tag."""
    for tag in reversed(run.tags):
        if tag.startswith("process:"):
            _, host, pid, started = tag.split(":", 3)
            return host, int(pid), started
    return None


def server_is_here() -> bool:
    """Whether the server listens on loopback, so that every run is of this machine."""
    return urlsplit(os.environ["PREFECT_API_URL"]).hostname in ("127.0.0.1", "localhost", "::1")


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


async def main(action: str, number: float) -> int:
    if action == "notify":
        return await notify(sys.stdin.read().strip())
    async with get_client() as client:
        if action == "prepare":
            await watch_heartbeats()
            await set_slots(client, int(number))
        if action in ("prepare", "reconcile"):
            return await reconcile(client)
        return await (cancel(client, number) if action == "cancel" else stale(client))


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], float(sys.argv[2]))))
