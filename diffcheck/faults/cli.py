"""``rlk-diff faults``: inject a fault that people really met, and see whether the tool names it."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from diffcheck.base.console import Terminal, listing
from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.files import STANDARD_OUTPUT, check_writable, write_json
from diffcheck.base.progress import Progress, ProgressLine, silent
from diffcheck.base.stopping import STOPS
from diffcheck.faults.library import CONTROLS, FAULTS
from diffcheck.faults.outcome import Outcome, scores
from diffcheck.faults.real_library import REAL_CONTROLS, REAL_FAULTS
from diffcheck.faults.results import Results
from diffcheck.report.terminal import print_verdict
from reference.contract.names import offered

_ENGINES = ("reference", "vllm", "megatron")
_SEE = "list them with rlk-diff faults --list"
#: (engine, fault's name, the pair in words, how to run it).
Job = tuple[str, str, str, Callable[[], Outcome]]


def faults(
    name: Annotated[str | None, typer.Argument(help="A fault or control; see --list.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", help="reference (a second), vllm or megatron. Default: reference, if it knows the fault."
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List all faults and negative controls.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Run all; print precision and recall.")] = False,
    real: Annotated[bool, typer.Option("--real", help="Run in real vLLM and real Megatron-core.")] = False,
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write the outcomes as JSON; an interrupted --all goes on from it."),
    ] = None,
) -> None:
    """Inject a known fault into one side of a small model and check what is named.

    [bold]Examples[/bold]

      rlk-diff faults --list
      rlk-diff faults rope-bf16-table
      rlk-diff faults stale-prefix-cache --engine vllm
      rlk-diff faults --all --real --json faults.json

    Exit codes: 0 everything was named as expected, 1 something was not, 2 usage error.
    """
    console = Terminal()
    if listed:
        console.print_list(_catalogue())
        return
    if every == (name is not None):
        raise InputError("give the name of one fault, or --all", _SEE)
    if name is not None and name not in _names():
        raise InputError(f"fault {name!r} is unknown; {offered(name, _names())}", _SEE)
    if engine is not None and (engine not in _ENGINES or (real and engine == "reference")):
        raise InputError(f"--engine {engine!r} is none of {', '.join(_ENGINES[real:])}", "choose one of them")
    if json_out:
        check_writable(json_out)
    alone = json_out == STANDARD_OUTPUT
    results = Results(None if alone else json_out, _command(every, real, name, engine))
    with (
        ExitStack() as stack,
        tempfile.TemporaryDirectory(prefix="rlk-faults-") as folder,
        ProgressLine(Terminal(stderr=True)) as progress,
    ):
        jobs = list(_jobs(name, engine, real, Path(folder), stack))
        for one in dict.fromkeys(job[0] for job in jobs):
            results.resume(one, keep=every)
        run_jobs(jobs, results, progress)
    results.finish()
    if alone:
        write_json(STANDARD_OUTPUT, results.to_json())
        console = Terminal(quiet=True)
    outcomes = list(results.all())
    for outcome in outcomes if name is not None else ():
        assert outcome.report is not None
        print_verdict(outcome.report, console)
    console.print(_table(outcomes))
    if every:
        for one, found in results.outcomes.items():
            precision, recall = scores(found)
            faulty = sum(o.expected != "equal" for o in found)
            count = f"{one}: {faulty} faults, {len(found) - faulty} negative controls"
            console.print(f"{count}: precision {precision:.3f}, recall {recall:.3f}")
    raise typer.Exit(ExitCode.EQUAL if all(o.found for o in outcomes) else ExitCode.DIVERGED)


def run_jobs(jobs: Sequence[Job], results: Results, progress: Progress) -> None:
    """Run what ``results`` does not have yet.

    Raises:
        KeyboardInterrupt: somebody pressed Ctrl-C, or a signal asked for the end. A search that is cut short answers
            with what it has; such an outcome is no miss, and is not kept.
    """
    pressed = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        pressed.set()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        for done, (engine, fault, described, run) in enumerate(jobs):
            progress(f"{fault} ({described})", done, len(jobs))
            if results.find(engine, fault, described) is None:
                outcome = run()
                if pressed.is_set():
                    raise KeyboardInterrupt
                results.add(engine, outcome)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _names() -> dict[str, str]:
    """Name -> cause, of all faults and controls, on whatever engine."""
    libraries = (FAULTS, REAL_FAULTS, CONTROLS, REAL_CONTROLS)
    return {name: fault.cause for library in libraries for name, fault in library.items()}


def _command(every: bool, real: bool, name: str | None, engine: str | None) -> str:
    words = ["rlk-diff faults", name or "", "--all" * every, "--real" * real, f"--engine {engine}" if engine else ""]
    return " ".join(word for word in words if word)


def _jobs(name: str | None, engine: str | None, real: bool, folder: Path, stack: ExitStack) -> Iterator[Job]:
    """What is to be run.

    Raises:
        InputError: the engine cannot have the fault.
    """
    known = {**FAULTS, **CONTROLS}
    if engine == "reference" or (engine is None and not real and (name is None or name in known)):
        if name is not None and name not in known:
            raise InputError(f"the reference engine cannot have fault {name!r}", "use --engine vllm or megatron")
        from diffcheck.faults.laboratory import describe, run_fault

        for fault in known.values() if name is None else [known[name]]:
            yield "reference", fault.name, describe(fault), lambda fault=fault: run_fault(fault, folder)  # type: ignore[misc]
        return
    from diffcheck.faults import engines

    live = stack.enter_context(engines.Engines(folder, silent))
    for found, run in engines.chosen(name, engine):
        job = lambda found=found, run=run: engines.run_real(found, run, live)  # noqa: E731
        yield run.engine, found.name, engines.describe(run), job


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("fault", "engine", "named first", "contract field"):
        table.add_column(heading, overflow="fold")
    for o in outcomes:
        mark = Text("ok", style="green") if o.found else Text("wrong", style="red")
        table.add_row(mark, Text(o.name), Text(o.engine), Text(o.named or o.verdict), Text(", ".join(o.fields)))
        for wrong in o.wrong:
            table.add_row("", "", "", Text(wrong, style="red"), "")
    return table


def _catalogue() -> Table:
    table = listing("fault", "what is wrong", "engines", "must be named", "reported in")
    for name, cause in _names().items():
        own = {**FAULTS, **CONTROLS}.get(name)
        in_engines = {**REAL_FAULTS, **REAL_CONTROLS}.get(name)
        runs = in_engines.runs if in_engines else ()
        engines = [*(["reference"] if own else []), *dict.fromkeys(run.engine for run in runs)]
        where = dict.fromkeys([*([own.where] if own else []), *(run.where for run in runs)])
        reports = own.reports if own else in_engines.reports if in_engines else ""
        table.add_row(name, cause, ", ".join(engines), ", ".join(filter(None, where)) or "nothing: equal", reports)
    return table
