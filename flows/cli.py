"""The command line: thin, each command imports what it needs when it runs, so that ``--help`` is immediate."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="grpoflow", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="The whole reasoning post-training recipe of DeepSeekMath and DeepSeek-R1 as one restartable workflow.",
)  # fmt: skip

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""

Root = Annotated[str, typer.Option("--root", help="Folder of all runs.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one field, such as grpo.group_size=16.")
]
Run = Annotated[str | None, typer.Option("--run", help="One run; all runs when not given.")]
Out = Annotated[Path | None, typer.Option("--out", help="File to write.")]
Home = Annotated[Path | None, typer.Option("--home", help="State folder of server and worker; default .grpoflow.")]


@app.command()
def run(
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe, or a .toml file.")] = None,
    set_: Overrides = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run; the same name continues it.")] = None,
    resume_from: Annotated[
        str | None, typer.Option(help="Stage key of --run-id from which a child run branches off.")
    ] = None,
    root: Root = "runs",
    prefect: Annotated[
        bool, typer.Option(help="Show the run in Prefect; a server is started when none answers.")
    ] = True,
) -> None:
    """Run the whole recipe here, or what is left of it. figure5 is a study of several runs, without Prefect."""
    if recipe == "figure5":
        from flows.study import run_study

        if resume_from:
            raise ValueError(
                "figure5 is a study of several runs: --resume-from needs the --run-id of one of them alone"
            )
        run_study(recipe, set_ or [], Path(root), run_id=run_id)
        return
    from flows.runs import open_run

    resolved, paths = open_run(recipe, set_ or [], run_id, resume_from, Path(root))
    if not prefect:
        from flows.execute import execute

        execute(resolved, paths)
        return
    from flows.service import Service
    from pipeline.config.secret import without_credentials
    from pipeline.rundir import locked

    with locked(paths):  # a run that another process works on is refused before a server is started
        pass
    service = Service()
    if not os.environ.get("PREFECT_API_URL"):
        print("Prefect: connecting to the local server, which starts when none answers …", flush=True)
    with service.server() as url:
        # Prefect's own INFO lines go to its page; the terminal keeps its warnings.
        os.environ.update(service.environment(url), PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="WARNING")
        page = without_credentials(url.removesuffix("/api"))
        print(f"Prefect: {page} shows this run while it works", flush=True)
        from prefect.exceptions import CancelledRun

        from flows.deployed import recipe as run_flow

        leave_failures_to_main()
        try:
            run_flow(None, [], paths.run_id, None, root)
        except CancelledRun:
            raise KeyboardInterrupt from None  # on the page, which is as good as Ctrl-C
        finally:
            send_last_logs()


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The .toml file to write.")] = Path("recipe.toml"),
    recipe: Annotated[str, typer.Option(help="The recipe to start from.")] = "embedded",
) -> None:
    """Write a recipe with every field and what changing it does, to edit."""
    from pipeline.config import load_recipe
    from pipeline.config.write import commented_toml

    if file.exists():
        raise ValueError(f"{file} exists and is left as it is; name another file")
    if not file.parent.is_dir():
        raise ValueError(f"{file}: folder {file.parent} does not exist; make it first")
    file.write_text(commented_toml(load_recipe(recipe, [f"name={file.stem}"])), encoding="utf-8")
    print(f"{file}: edit it, then grpoflow run --recipe {file}")


@app.command()
def join(
    rendezvous: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The recipe's learner.rendezvous.")],
) -> None:
    """Lend this machine to a run on another one: start its share of the learner's ranks whenever it asks for them."""
    from pipeline.backends.nodes import join as serve_ranks

    serve_ranks(rendezvous)


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or a .toml file.")] = "embedded",
    gpus: Annotated[
        int, typer.Option(help="GPUs, all alike: each gets a learner's rank and a share of an engine.")
    ] = 1,
    gpu_memory: Annotated[float, typer.Option(help="Memory of a GPU, GiB.")] = 80.0,
    set_: Overrides = None,
    prompt_tokens: Annotated[float, typer.Option(help="Mean length of a prompt.")] = 128,
    completion_tokens: Annotated[
        float | None, typer.Option(help="Mean length of a completion; half of sampler.max_tokens when not given.")
    ] = None,
    rates: Annotated[str, typer.Option(help="h100, or measured: of this machine.")] = "h100",
    flops: Annotated[float | None, typer.Option(help="Operations a second of a GPU in model.dtype, instead.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes a second of a GPU's memory, instead.")] = None,
    network: Annotated[float | None, typer.Option(help="Bytes a second of a GPU to others, instead.")] = None,
    reached: Annotated[float | None, typer.Option(help="Share of the operations that layers reach; 0.4.")] = None,
    table: Annotated[bool, typer.Option("--table", help="0.5B to 72B on 1 to 1,024 GPUs, as Markdown.")] = False,
) -> None:
    """Whether a recipe fits on GPUs, seconds a step, and storage a day: arithmetic, nothing is loaded."""
    from pipeline.config import load_recipe
    from pipeline.plan.show import print_plan

    print_plan(
        load_recipe(recipe, set_ or []), gpus=gpus, gib=gpu_memory, prompt=prompt_tokens, completion=completion_tokens,
        rates=rates, given={"flops": flops, "bandwidth": bandwidth, "network": network, "reached": reached}, table=table,
    )  # fmt: skip


@app.command()
def up(
    slots: Annotated[
        int | None, typer.Option(min=1, help="Runs that work at a time; later ones queue. 1, or what was set before.")
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Post failed runs, warnings and finished reports there; off ends it."),
    ] = None,
    home: Home = None,
) -> None:
    """Start the Prefect server and a worker on this machine, with the deployments in place."""
    from flows.service import Service

    if notify is not None and notify != "off" and not notify.startswith(("http://", "https://")):
        raise ValueError(f"--notify {notify}: expected an address that begins with http:// or https://, or off")
    Service(home).up(slots=slots, notify=notify)


@app.command()
def down(home: Home = None) -> None:
    """Cancel live runs, then end the worker and the server that `up` started."""
    from flows.service import Service

    Service(home).down()


@app.command()
def doctor(root: Root = "runs", home: Home = None) -> None:
    """Look at server, worker, database, stale runs and locks; exit status 1 when something is wrong."""
    from flows.service import Service

    rows = Service(home).doctor(Path(root))
    for what, good, details in rows:
        print(f"{'ok' if good else 'BAD':<4} {what:<12} {details}")
    if not all(good for _, good, _ in rows):
        raise typer.Exit(1)


@app.command()
def status(run_id: Annotated[str | None, typer.Argument(metavar="[RUN]")] = None, root: Root = "runs") -> None:
    """Stages done, running and to do, and the rewards so far; of all runs when none is named."""
    from flows.status import print_run, print_runs

    if run_id is None:
        print_runs(Path(root))
    else:
        print_run(Path(root), run_id)


@app.command()
def sql(
    query: Annotated[str | None, typer.Argument(help="One reading statement.")] = None,
    run_id: Run = None,
    format_: Annotated[str, typer.Option("--format", help="table, csv, json, jsonl or parquet.")] = "table",
    out: Out = None,
    named: Annotated[str | None, typer.Option(help="One of the queries of --list.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the named queries.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Show every table's columns.")] = False,
    gib: Annotated[float, typer.Option("--gib", help="Most memory the query may take.")] = 4.0,
    seconds: Annotated[float, typer.Option("--seconds", help="Most time the query may take.")] = 300.0,
    root: Annotated[str, typer.Option(help="Folder of all runs, or its URL: s3://bucket/runs.")] = "runs",
) -> None:
    """Ask the rollout history of one run or of all."""
    from pipeline.ask import answer

    answer(
        query, run_id, root, format_=format_, out=out, named=named, list_=list_, schema=schema,
        gib=gib, seconds=seconds,
    )  # fmt: skip


@app.command()
def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    out: Annotated[Path, typer.Option(help="The .jsonl or .parquet file to write.")],
    kind: Annotated[str, typer.Option(help="sft: prompt, completion. preference: prompt, chosen, rejected.")] = "sft",
    where: Annotated[str, typer.Option(help='SQL condition on the view scored, such as "round = 2".')] = "true",
    per_problem: Annotated[int, typer.Option(help="Most rows of one problem.")] = 4,
    root: Root = "runs",
) -> None:
    """Write a training set of a run's rollouts: correct, finished, distinct ones, or pairs of correct and wrong."""
    from pipeline.export import export as export_set

    rows = export_set(run_id, kind, out, root=root, where=where, per_problem=per_problem)
    print(f"{out}: {rows} rows")


@app.command()
def grade(
    cases: Annotated[Path, typer.Argument(help="JSON lines with id, gold and completion.")],
    out: Out = None,
    explain: Annotated[str | None, typer.Option(metavar="ID", help="Show how this row was judged.")] = None,
) -> None:
    """Judge answers by the verifier."""
    from rewards.grade import grade as grade_file

    grade_file(cases, out=out, explain=explain)


@app.command()
def evaluate(
    model: Annotated[str | None, typer.Option(help="Folder or Hub name of the model.")] = None,
    benchmark: Annotated[str, typer.Option(help="embedded, gsm8k, math, math500, svamp, mgsm/LANGUAGE.")] = "embedded",
    samples: Annotated[int, typer.Option(min=1, help="Completions a problem.")] = 8,
    limit: Annotated[int | None, typer.Option(min=2, help="Problems, drawn by seed; all when not given.")] = None,
    path: Annotated[str | None, typer.Option(help="A local copy of the benchmark.")] = None,
    completions: Annotated[Path | None, typer.Option(help="A file of completions made elsewhere, instead.")] = None,
    column: Annotated[list[str] | None, typer.Option(metavar="OURS=THEIRS", help="A column of that file.")] = None,
    set_: Overrides = None,
    k: Annotated[list[int] | None, typer.Option(help="A k of pass@k and maj@k for that file; may be repeated.")] = None,
    out: Out = None,
    root: Root = "runs",
) -> None:
    """Measure pass@k and maj@k with intervals: of a model on a benchmark, or of a file of completions."""
    if (model is None) == (completions is None):
        raise ValueError("evaluate needs one of --model (a folder or Hub name) and --completions (a file)")
    if completions is not None:
        from flows.elsewhere import evaluate_file

        print("\n".join(evaluate_file(completions, columns=column or [], ks=k, out=out)))
    elif model is not None:
        from flows.evaluate_model import evaluate_model

        evaluate_model(model, benchmark, samples=samples, limit=limit, path=path, overrides=set_ or [], root=Path(root))


@app.command()
def select(
    out: Annotated[Path, typer.Option(help="The .jsonl or .parquet file to write.")],
    recipe: Annotated[str, typer.Option(help="Name of a recipe, or a .toml file.")] = "embedded",
    set_: Overrides = None,
    show: Annotated[int, typer.Option(help="Prompts to print as the model will see them.")] = 0,
    web: Annotated[
        str | None, typer.Option(metavar="POOL", help="Select mathematical web pages of these files.")
    ] = None,
    seed_pages: Annotated[str | None, typer.Option(help="With --web: files of pages to start from.")] = None,
) -> None:
    """The selection stage alone: problems (or web pages) to a file, with the funnel and what was set aside beside it."""
    from flows.execute import prepare_libraries
    from pipeline.config import load_recipe

    if (web is None) != (seed_pages is None):
        raise ValueError("--web and --seed-pages go together: the pool of pages, and mathematical pages to start from")
    chosen = load_recipe(recipe, set_ or [])
    prepare_libraries(chosen)
    if web is not None and seed_pages is not None:
        from stages.select_web import select_web_files

        select_web_files(chosen, web, seed_pages, out, chosen.data.web)
        return
    from stages.select import select_files

    select_files(chosen, out, show=show)


@app.command()
def report(
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN …")] = None,
    out: Out = None,
    picture: Annotated[Path | None, typer.Option(help="Of one run: also this .png of what it learnt, to show.")] = None,
    root: Root = "runs",
) -> None:
    """One HTML file with pictures inside, of one run or several side by side; of all, with an index, when none is named."""
    from flows.evaluate import report_all
    from flows.runs import find_run

    if picture is not None and (len(runs or []) != 1 or picture.suffix != ".png"):
        raise ValueError(
            f"--picture {picture}: expected a file.png, and one run, as in grpoflow report RUN --picture {picture.stem}.png"
        )
    if not runs:
        if not Path(root).is_dir():
            raise ValueError(f"{root}: there is no folder of runs; start one with `grpoflow run`, or name --root")
        index, _ = report_all(Path(root))
        print(index)
        return
    from eval.gather import gather
    from eval.plots import learning_picture
    from eval.report import build_report

    chosen = [find_run(Path(root), run_id) for run_id in runs]
    print(build_report(chosen, out or chosen[0].report("report" if len(chosen) == 1 else "compare")))
    if picture is not None:
        print(learning_picture(gather(chosen[0]), picture))


@app.command()
def compare(run_a: str, run_b: str, root: Root = "runs", checkpoint: str = "final") -> None:
    """The paired difference of two runs on their common held-out problems, with its interval."""
    from eval.compare import compare_runs
    from flows.runs import find_run

    for line in compare_runs(find_run(Path(root), run_a), find_run(Path(root), run_b), checkpoint=checkpoint):
        print(line)


def leave_failures_to_main() -> None:
    """What a run warns of stands in its own lines, and why it failed is for ``main`` to say, once, in a line.

    The Prefect page and ``run.log`` have it all, with the traceback.
    """
    import prefect.logging  # noqa: F401 - the import sets the handlers up

    sources = ("prefect.flow_runs", "prefect.task_runs", "flows.execute", "stages.guards", "rewards.watch")
    for name in ("root", "prefect", "prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            if type(handler).__name__ == "PrefectConsoleHandler":
                handler.addFilter(
                    lambda record: record.levelno < logging.WARNING or not record.name.startswith(sources)
                )


def send_last_logs() -> None:
    """Hand the last log lines to the server while it is there; without it the end of the process tries for a minute."""
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=10)


def main() -> None:
    """Exit status 0 only when all of it worked; 2 with one line for a mistake that the user can mend."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does: engines closed, resumable
    try:
        status = app(standalone_mode=False)  # typer.Exit comes back as a number, and Ctrl-C as 130
        if status == INTERRUPTED:
            fail("stopped; the same command continues where it was", INTERRUPTED)
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(fail("stopped; the same command continues where it was", INTERRUPTED))
    except (ValueError, FileNotFoundError, BlockingIOError, PermissionError, TimeoutError, MemoryError) as error:
        sys.exit(fail(str(error), 2))
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        sys.exit(fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2))
    except OSError as error:
        from pipeline.rundir import NO_SPACE

        if error.errno not in (*NO_SPACE, errno.EROFS):
            raise
        named = f"{error.filename}: " if error.filename else ""
        way_out = "free space" if error.errno in NO_SPACE else "make it writable"
        sys.exit(fail(f"{named}{error.strerror}; {way_out}, then the same command continues", 2))
    except RuntimeError as error:
        sys.exit(fail(str(error), 1))
    except Exception as error:
        if hasattr(error, "format_message"):  # what the command line itself refuses: typer carries its own click
            sys.exit(fail(f"{error.format_message()} (grpoflow --help)", 2))
        raise


def fail(message: str, status: int) -> int:
    """Print one line to stderr."""
    from pipeline.config.secret import without_credentials

    line: Any = without_credentials(" ".join(message.split()))
    print(f"grpoflow: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
