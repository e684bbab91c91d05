"""The command ``rlk-diff``."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from diffcheck.base.console import Terminal, listing, unbroken_output
from diffcheck.base.errors import ExitCode, InputError, RlkError, missing
from diffcheck.base.files import STANDARD_OUTPUT, check_writable, disk_error, write_json
from diffcheck.base.models import BUILT_IN
from diffcheck.base.progress import ProgressLine, is_quiet, set_quiet
from diffcheck.base.recorded import RECORDED
from diffcheck.base.stopping import Stopped, stopped_in_order
from diffcheck.capture.adapter import ENGINES
from diffcheck.capture.overrides import parse_override
from diffcheck.capture.patches import parse_patch
from diffcheck.cli import contract as contract_cli
from diffcheck.cli.options import Config, Quiet, Version, take_config_for
from diffcheck.cli.schema import schema
from diffcheck.faults.cli import faults
from diffcheck.infer.cli import infer
from diffcheck.localize.verdict import Verdict
from diffcheck.report.terminal import print_verdict
from diffcheck.runs import RunSettings
from diffcheck.trace.schema import LEVELS

app = typer.Typer(
    name="rlk-diff",
    help="Find out where and why two engines' logprobs differ.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(contract_cli.app, name="contract")
app.command()(infer)
app.command()(faults)
app.command()(schema)
#: Diagnostics and progress; results go to standard output.
_errors = Terminal(stderr=True)
_debug = False
#: The shell's code for a process ended by Ctrl-C; typer returns it instead of raising.
_INTERRUPTED = 130
_INTERRUPTED_TEXT = Text.assemble(("interrupted", "yellow"), "; nothing half-written is left")
#: Sources of an option's value that are the user's own.
_TYPED = ("COMMANDLINE", "DEFAULT_MAP")
#: What typer raises for a bad command line, whichever copy of click it uses.
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_ENGINE_NAMES = ", ".join(ENGINES)
_run_option = functools.partial(typer.Option, rich_help_panel="What is run")
#: Options of every command that runs an engine. Names and defaults are those of `RunSettings`.
_RUN_OPTIONS: dict[str, Any] = {
    "model": Annotated[str, _run_option("--model", help=f"Hugging Face folder, or {', '.join(BUILT_IN)}.")],
    "profile": Annotated[str | None, _run_option("--profile", help="Arithmetic profile, e.g. strict-v1/fma32-seq.")],
    "samples": Annotated[Path | None, _run_option("--samples", help="JSON lines; default: samples built in.")],
    "phase": Annotated[str, _run_option("--phase", help="decode: real continuous batching; prefill: one pass.")],
    "dtype": Annotated[str, _run_option("--dtype", help="bfloat16 or float32.")],
    "device": Annotated[str, _run_option("--device", help="cpu or cuda (CUDA and ROCm builds of torch).")],
    "tensor_parallel": Annotated[int, _run_option("--tp", min=1, help="Tensor-parallel ranks of each engine.")],
    "layers": Annotated[str | None, _run_option("--layers", help="Layers A:B to observe; B excluded.", metavar="A:B")],
    "level": Annotated[str, _run_option("--level", help="What traces keep: digest, sampled or full.")],
    "generate": Annotated[int, _run_option("--generate", min=1, help="Tokens a rollout engine writes per sample.")],
    "seed": Annotated[int, _run_option("--seed", help="Seed of the rollout's draws.")],
    "temperature": Annotated[float | None, _run_option("--temperature", help="Default: the samples' own, else 1.")],
    "top_p": Annotated[float, _run_option("--top-p", min=0.0, max=1.0)],
    "top_k": Annotated[int, _run_option("--top-k", min=0, help="0: all.")],
    "override": Annotated[list[str] | None, _run_option("--override", help="Change one side on purpose; repeatable.")],
    "patch": Annotated[
        list[str] | None,
        _run_option(
            "--patch",
            metavar="FILE.py:FUNCTION",
            help="Call a function with the live model of one side (rollout/FILE.py:..., default train); repeatable.",
        ),
    ],
}
_RUN_OPTIONS |= {"config": Config, "quiet": Quiet}
_switch = functools.partial(
    typer.Option, metavar="NAME=VALUE", help="A switch of the engine, see rlk-diff engines; repeatable."
)
_Json = Annotated[Path | None, typer.Option("--json", help="Write the verdict as JSON; -: to standard output, alone.")]
_Html = Annotated[Path | None, typer.Option("--html", help="Write the verdict as one self-contained page.")]
_Every = Annotated[bool, typer.Option("--all", help="List every boundary, equal ones too.")]


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with `_RUN_OPTIONS` besides its own; it finds them in its context.

    typer reads options from a signature and from nowhere else, and two commands that write them out drift apart.
    """
    own = inspect.signature(command, eval_str=True).parameters
    defaults = {f.name: f.default for f in fields(RunSettings)} | {"quiet": False}
    kind = inspect.Parameter.KEYWORD_ONLY
    every = [p.replace(kind=kind) for p in own.values()]
    every += [
        inspect.Parameter(name, kind, default=defaults.get(name), annotation=option)
        for name, option in _RUN_OPTIONS.items()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**{name: value for name, value in given.items() if name in own})

    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in every}
    return run


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces and engine logs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and of a verdict one line.")] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.toml", help="Options of the command from a file, one to one."),
    ] = None,
    version: Version = False,
) -> None:
    global _debug
    _debug = debug
    set_quiet(quiet)
    if config is not None:
        take_config_for(context, config)


def run_settings(context: typer.Context) -> RunSettings:
    """The command's options as settings; their names are the same."""
    given = dict(context.params)
    _one_of("--phase", given["phase"], ("decode", "prefill"))
    if given.get("train_phase") is not None:
        _one_of("--train-phase", given["train_phase"], ("decode", "prefill"))
    _one_of("--dtype", given["dtype"], ("bfloat16", "float32"))
    _one_of("--device", given["device"], ("cpu", "cuda"))
    _one_of("--level", given["level"], LEVELS)
    if given["temperature"] is not None and not 0 < given["temperature"] < math.inf:
        raise InputError(f"--temperature {given['temperature']} is not positive and finite", "logprobs need T > 0")
    given["layers"] = _layer_range(given["layers"])
    for name, field in (("rollout_option", "options"), ("option", "options"), ("train_option", "train_options")):
        if name in given:
            given[field] = tuple(given.pop(name) or ())
    # A capture has one side, whatever the patch calls it.
    patches = [parse_patch(text) for text in given.pop("patch") or ()]
    given["patches"] = tuple(replace(p, side="train") if "engine" in given else p for p in patches)
    given["overrides"] = tuple(parse_override(text) for text in given.pop("override") or ())
    chosen = {f.name: given[f.name] for f in fields(RunSettings) if f.name in given}
    sources = {name: context.get_parameter_source(name) for name in chosen}
    typed = frozenset(name for name, source in sources.items() if source and source.name in _TYPED)
    return RunSettings(**chosen, given=typed)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{option} {value!r} is none of {', '.join(allowed)}", f"choose one of {', '.join(allowed)}")


def _layer_range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon or not first.isdigit() or not last.isdigit() or int(first) >= int(last):
        raise InputError(f"--layers {text!r} is not a range", "write A:B with A < B, for example 0:4")
    return int(first), int(last)


@app.command()
@with_run_options
def localize(
    context: typer.Context,
    rollout: Annotated[
        str, typer.Option("--rollout", help=f"{_ENGINE_NAMES}, {RECORDED} (what the samples carry), or a trace folder.")
    ] = "vllm",
    train: Annotated[str, typer.Option("--train", help=f"{_ENGINE_NAMES}, or a trace folder.")] = "megatron",
    infer: Annotated[bool, typer.Option("--infer", help="Find each side's contract where they first diverge.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Find the operators whose alignment makes the logprobs equal.")
    ] = False,
    json_out: _Json = None,
    html: _Html = None,
    every: _Every = False,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep both traces and engine logs in this folder.")
    ] = None,
    train_phase: Annotated[str | None, typer.Option("--train-phase", help="The train side's, if another.")] = None,
    train_tensor_parallel: Annotated[
        int | None, typer.Option("--train-tp", min=1, help="The train side's, if another.")
    ] = None,
    train_profile: Annotated[str | None, typer.Option("--train-profile", help="The train side's, if another.")] = None,
    rollout_option: Annotated[list[str] | None, _switch("--rollout-option")] = None,
    train_option: Annotated[list[str] | None, _switch("--train-option")] = None,
) -> None:
    """Name the first boundary at which two engines diverge.

    [bold]Examples[/bold]

      rlk-diff localize
      rlk-diff localize --infer
      rlk-diff localize --ablate --infer
      rlk-diff localize --model smollm2-135m --json verdict.json --html report.html
      rlk-diff localize --model ./Qwen3-0.6B --samples rollouts.jsonl --dtype float32
      rlk-diff localize --rollout vllm --train vllm --phase prefill
      rlk-diff localize --rollout recorded --samples rollouts.jsonl --model ./Qwen3-0.6B
      rlk-diff localize --override 'layers.1.mlp.act: flip=0,3,5'
      rlk-diff localize --patch gate.py:sigmoid_of_1_702
      rlk-diff localize --rollout-option max_num_batched_tokens=64 --train-option micro_batch=2

    Exit codes: 0 equal, 1 diverged, 2 usage or environment error, 3 not comparable, 4 inconclusive.
    """
    from diffcheck.runs import run_localize

    settings = run_settings(context)
    _check_outputs(json_out, html)
    with ProgressLine(_errors) as progress:
        verdict, _ = run_localize(settings, rollout, train, progress)
    _report(verdict, json_out, every)


@app.command()
@with_run_options
def capture(
    context: typer.Context,
    engine: Annotated[str, typer.Option("--engine", help=_ENGINE_NAMES)],
    out: Annotated[Path, typer.Option("--out", help="Trace folder to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing trace.")] = False,
    samples_out: Annotated[Path | None, typer.Option("--samples-out", help="Write the finished samples.")] = None,
    option: Annotated[list[str] | None, _switch("--option")] = None,
) -> None:
    """Record one engine's boundaries as a trace that can be compared elsewhere.

    [bold]Examples[/bold]

      rlk-diff capture --engine vllm --out traces/rollout --samples-out rollouts.jsonl
      rlk-diff capture --engine megatron --samples rollouts.jsonl --out traces/train
      rlk-diff capture --engine vllm --out traces/small --level digest --layers 0:4
    """
    from diffcheck.base.samples import save_samples
    from diffcheck.runs import run_capture

    _one_of("--engine", engine, (*ENGINES, RECORDED))
    settings = run_settings(context)
    for path in (samples_out, out):
        if path:
            check_writable(path) if path is samples_out else path.parent.mkdir(parents=True, exist_ok=True)
    with ProgressLine(_errors) as progress:
        result = run_capture(settings, engine, out, progress, overwrite=overwrite)
    if samples_out:
        save_samples(samples_out, result.samples)
    tokens = sum(len(s.response_token_ids) for s in result.samples)
    Terminal().print(f"{out}: {len(result.samples)} samples, {tokens} response tokens")


@app.command()
def compare(
    left: Annotated[Path, typer.Argument(help="Trace of the rollout side.")],
    right: Annotated[Path, typer.Argument(help="Trace of the train side.")],
    json_out: _Json = None,
    html: _Html = None,
    every: _Every = False,
    config: Config = None,
    quiet: Quiet = False,
    infer: Annotated[bool, typer.Option("--infer", help="Find each side's contract where they first diverge.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="With --infer: the traced model, where it is not found by itself.")
    ] = None,
) -> None:
    """Compare two traces; needs no engine, so a cluster run can be compared on a laptop.

    [bold]Examples[/bold]

      rlk-diff compare traces/rollout traces/train --html report.html
      rlk-diff compare traces/rollout traces/train --infer --model ./Qwen3-0.6B

    Exit codes: 0 equal, 1 diverged, 2 usage or environment error, 3 not comparable, 4 inconclusive.
    """
    from diffcheck.runs import run_compare

    _check_outputs(json_out, html)
    if model is not None and not infer:
        raise InputError("--model is read by --infer alone: traces hold what is compared", "add --infer")
    with ProgressLine(_errors) as progress:
        verdict = run_compare(left, right, progress, model=model, infer=infer, html=html)
    _report(verdict, json_out, every)


@app.command()
def engines() -> None:
    """List the switches of every engine: type, default, meaning.

    [bold]Examples[/bold]

      rlk-diff engines
      rlk-diff localize --rollout-option max_num_batched_tokens=64 --train-option micro_batch=2
      rlk-diff capture --engine vllm --option block_size=32 --out traces/rollout
    """
    from diffcheck.capture.switches import table_of

    for engine in ENGINES:
        table = listing("option", "type", "default", "meaning", names=3, title=engine)
        for name, switch in table_of(engine).items():
            default = "the engine's" if switch.default is None else str(switch.default).lower()
            meaning = f"{switch.meaning}: {', '.join(switch.choices)}" if switch.choices else switch.meaning
            table.add_row(name, switch.kind.__name__, default, meaning)
        Terminal().print_list(table)


@app.command()
def doctor(
    target: Annotated[
        str | None, typer.Option("--target", help="Compile and check every kernel for gfx942 or sm_90; no GPU needed.")
    ] = None,
    only: Annotated[str, typer.Option("--only", help="With --target: only calls whose name contains this.")] = "",
    run: Annotated[
        bool, typer.Option("--run", help="With --target gfx942: execute the code in emulation, compare every bit.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's GPU: its units, primitives, kernels, ceilings.")
    ] = False,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0, help="With --measure: no kernel's case starts later than this.")
    ] = 5.0,
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write the findings; with --measure the report (default: measure-ARCH.json)."),
    ] = None,
    compared: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Two files of --measure.", metavar="A B")
    ] = None,
) -> None:
    """Say what is installed, what would run, what is missing and how to get it.

    [bold]Examples[/bold]

      rlk-diff doctor
      rlk-diff doctor --target gfx942 --only rms_norm
      rlk-diff doctor --target gfx942 --run --only swiglu
      rlk-diff doctor --measure --json mi300x.json
      rlk-diff doctor --compare mi300x.json h200.json
    """
    from diffcheck.cli.doctor import examine, to_json

    if sum((target is not None, measure, compared is not None)) > 1:
        raise InputError("--target, --measure and --compare exclude each other", "give one of them")
    if json_out is not None and (target is not None or compared is not None):
        raise InputError("--json is not for --target and --compare", "leave it out, or give it alone or with --measure")
    if only and target is None:
        raise InputError("--only is only for --target", "add --target gfx942")
    if measure:
        raise typer.Exit(_measure(minutes, json_out))
    if compared:
        raise typer.Exit(_compare_measurements(*compared))
    if run and target != "gfx942":
        raise InputError(f"--run executes code of gfx942, not of {target or 'no target'}", "add --target gfx942")
    if run:
        raise typer.Exit(_execute_kernels(only))
    if target is not None:
        raise typer.Exit(_examine_kernels(target, only))

    if json_out:
        check_writable(json_out)
    findings = examine()
    if json_out:
        write_json(json_out, to_json(findings))
    if json_out != STANDARD_OUTPUT:
        style = {"ok": "green", "warn": "yellow", "missing": "red"}
        table = listing("", "what", "found", "what to do", names=2)
        for f in findings:
            table.add_row(Text(f.level, style=style[f.level]), f.what, f.found, f.remedy)
        Terminal().print_list(table)
    if any(f.level == "missing" for f in findings):
        raise typer.Exit(ExitCode.USAGE)


def _examine_kernels(target: str, only: str) -> ExitCode:
    from diffcheck.cli.doctor import kernel_reports

    broken = 0
    Terminal().print(f"{'call':<48} {'kernel':<28} registers  shared scratch occupancy", soft_wrap=True)
    with ProgressLine(_errors) as progress:
        for line, is_ok in kernel_reports(target, only, progress):
            Terminal().print(line, highlight=False, soft_wrap=True)
            broken += not is_ok
    return ExitCode.DIVERGED if broken else ExitCode.EQUAL


def _execute_kernels(only: str) -> ExitCode:
    from diffcheck.cli.doctor import executed_kernels

    failing = count = 0
    say = functools.partial(Terminal().print, highlight=False, soft_wrap=True)
    with ProgressLine(_errors) as progress:
        for line, is_ok in executed_kernels(only, progress):
            say(line)
            count += 1
            failing += not is_ok
    say(f"{count} kernels executed in emulation, {failing} failing")
    return ExitCode.DIVERGED if failing or not count else ExitCode.EQUAL


def _measure(minutes: float, json_out: Path | None) -> ExitCode:
    from diffcheck.measurements import run_measurement

    if json_out:
        check_writable(json_out)
    # Alone on standard output, where the report goes there.
    say = functools.partial(Terminal(stderr=json_out == STANDARD_OUTPUT).print, highlight=False, soft_wrap=True)
    report = run_measurement(minutes, say)
    path = json_out or Path(f"measure-{report['device']['arch']}.json")
    write_json(path, report)
    for finding in report["findings"]:
        say(f"differs: {finding['what']}\n  change: {finding['change']}")
    say(f"{path}: {len(report['findings'])} findings, {len(report['not_run'])} parts not run")
    return ExitCode.DIVERGED if report["findings"] else ExitCode.EQUAL


def _compare_measurements(left: Path, right: Path) -> ExitCode:
    from diffcheck.measurements import compare_files

    table = listing("", "what", left.name, right.name)
    differences = compare_files(left, right)
    unequal = [d for d in differences if not d.equal]
    for d in sorted(differences, key=lambda d: d.equal):
        if not d.equal or not d.what.startswith("kernel "):
            table.add_row(Text("equal", "green") if d.equal else Text("differs", "red"), d.what, d.left, d.right)
    Terminal().print_list(table)
    Terminal().print(f"{len(unequal)} of {len(differences)} things that both measured differ", highlight=False)
    return ExitCode.DIVERGED if unequal else ExitCode.EQUAL


def _check_outputs(json_out: Path | None, html: Path | None) -> None:
    """Refuse what cannot be written before any engine starts, and a page whose libraries are missing."""
    for path in filter(None, (json_out, html)):
        check_writable(path)
    if html:
        import diffcheck.report.html  # noqa: F401


def _report(verdict: Verdict, json_out: Path | None, every: bool) -> None:
    if json_out:
        write_json(json_out, verdict.to_json())
    if json_out == STANDARD_OUTPUT:
        raise typer.Exit(verdict.exit_code)
    if is_quiet():
        Terminal().print(Text(verdict.summary), soft_wrap=True)
    else:
        print_verdict(verdict, Terminal(), every_boundary=every)
    raise typer.Exit(verdict.exit_code)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every fault ends as one line of cause and one of remedy, with its exit code."""
    sys.exit(guard(lambda: app(args=arguments, standalone_mode=False)))


def _tell(what: str, style: str, text: str) -> None:
    _errors.print(Text.assemble((what, style), f" {text}"), soft_wrap=True)


def guard(run: Callable[[], Any]) -> int:
    """The exit code of ``run``, with every fault told in one line of cause and one of remedy."""
    with unbroken_output(), stopped_in_order() as stopped:
        return _guarded(run, stopped)


def _guarded(run: Callable[[], Any], stopped: Stopped) -> int:
    try:
        code = run()
        if code == _INTERRUPTED:
            _errors.print(_INTERRUPTED_TEXT)
            return stopped.exit_code
        return int(code) if isinstance(code, int) else int(ExitCode.EQUAL)
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as error:
        error.show()
        return int(ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        _errors.print(_INTERRUPTED_TEXT)
        return stopped.exit_code
    except RlkError as error:
        _tell("error:", "red", error.cause)
        if error.remedy:
            _tell("remedy:", "dim", error.remedy)
        if _debug:
            _errors.print_exception()
            for note in getattr(error, "__notes__", ()):
                _errors.print(note, highlight=False)
        return int(error.exit_code)
    except Exception as error:
        if _debug:
            raise
        if isinstance(error, OSError | ImportError):
            cause, remedy = disk_error(error) if isinstance(error, OSError) else missing(error)
            _tell("error:", "red", cause)
            _tell("remedy:", "dim", remedy)
            return int(ExitCode.USAGE)
        _tell("internal error:", "red", f"{type(error).__name__}: {error}")
        _tell("remedy:", "dim", "run again as `rlk-diff --debug ...` and report what it prints")
        return int(ExitCode.USAGE)
