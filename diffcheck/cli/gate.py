"""``rlk-diff gate``: rules for continuous integration, one line each, with JUnit XML."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from diffcheck.base.console import Terminal
from diffcheck.base.errors import InputError
from diffcheck.base.files import STANDARD_OUTPUT, check_writable, write_json, write_text
from diffcheck.base.progress import ProgressLine
from diffcheck.cli.commands import app, run_settings, with_run_options
from diffcheck.gate import Rules, Subject, exit_code, judge, junit, read_subject
from diffcheck.gate.subject import of_verdict

_rule = {"rich_help_panel": "Rules"}
_STYLE = {"holds": "green", "broken": "red", "not_comparable": "magenta", "undecided": "yellow"}


@app.command()
@with_run_options
def gate(
    context: typer.Context,
    verdicts: Annotated[
        list[Path] | None,
        typer.Argument(help="Verdicts (--json of localize or compare) or folders of rlk-grpo runs; none: run engines."),
    ] = None,
    rollout: Annotated[str, typer.Option("--rollout", help="As of localize.")] = "vllm",
    train: Annotated[str, typer.Option("--train", help="As of localize.")] = "megatron",
    max_mismatch: Annotated[
        int | None,
        typer.Option("--max-mismatch", min=0, help="Logprobs that may differ; alone the default, 0.", **_rule),
    ] = None,
    max_abs_diff: Annotated[
        float | None, typer.Option("--max-abs-diff", min=0, help="Largest difference, in nats.", **_rule)
    ] = None,
    max_k3: Annotated[float | None, typer.Option("--max-k3", min=0, help="Largest k3, in nats.", **_rule)] = None,
    max_boundaries: Annotated[
        int | None, typer.Option("--max-boundaries", min=0, help="Boundaries that may differ.", **_rule)
    ] = None,
    min_coverage: Annotated[
        float | None,
        typer.Option("--min-coverage", min=0, max=1, help="Share of boundaries that both sides show.", **_rule),
    ] = None,
    min_compared: Annotated[
        int, typer.Option("--min-compared", min=1, help="Logprobs that must have been compared.", **_rule)
    ] = 1,
    must_equal: Annotated[
        list[str] | None,
        typer.Option("--must-equal", metavar="PATTERN", help="Boundaries that must be equal; repeatable.", **_rule),
    ] = None,
    junit_out: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write what was judged as JSON.")] = None,
    train_tensor_parallel: Annotated[
        int | None, typer.Option("--train-tp", min=1, help="The train side's, if another.")
    ] = None,
    train_profile: Annotated[str | None, typer.Option("--train-profile", help="The train side's, if another.")] = None,
    rollout_option: Annotated[list[str] | None, typer.Option("--rollout-option", metavar="NAME=VALUE")] = None,
    train_option: Annotated[list[str] | None, typer.Option("--train-option", metavar="NAME=VALUE")] = None,
) -> None:
    """Judge rules over a comparison: one line a rule, JUnit XML for CI.

    [bold]Examples[/bold]

      rlk-diff gate --max-mismatch 0 --junit out.xml --profile strict-v1/fma32-seq
      rlk-diff gate --max-mismatch 0 --min-coverage 0.95 --junit out.xml verdict.json
      rlk-diff gate --must-equal 'layers.*.mlp.act' --rollout traces/a --train traces/b
      rlk-diff gate --max-mismatch 0 --min-compared 1000 --junit out.xml runs/nightly

    Exit codes: 0 every rule holds, 1 one is broken, 2 usage or environment error, 3 not comparable, 4 a rule is
    undecided.
    """
    for path in filter(None, (junit_out, json_out)):
        check_writable(path)
    rules = Rules(
        max_mismatch, max_abs_diff, max_k3, max_boundaries, min_coverage, min_compared, tuple(must_equal or ())
    )
    if rules == Rules(min_compared=min_compared):
        rules = Rules(max_mismatch=0, min_compared=min_compared)
    subjects = _read(context, verdicts) if verdicts else [_run(context, rollout, train)]
    judged = [(subject, judge(subject, rules)) for subject in subjects]
    if junit_out:
        write_text(junit_out, junit(judged))
    if json_out:
        listed = [{"name": s.name, "verdict": s.verdict, "rules": [asdict(r) for r in rs]} for s, rs in judged]
        write_json(json_out, {"schema": 1, "subjects": listed})
    # With the answers alone on standard output, what is told goes beside it.
    out = Terminal(stderr=json_out == STANDARD_OUTPUT)
    for subject, rulings in judged:
        for ruling in rulings:
            word = ruling.outcome.replace("_", " ")
            out.print(
                Text.assemble(
                    (f"{word:<10}", _STYLE[ruling.outcome]), f" {subject.name}: {ruling.rule}: {ruling.found}"
                ),
                soft_wrap=True,
            )
    raise typer.Exit(exit_code([r for _, rulings in judged for r in rulings]))


#: Options that belong to the gate itself; every other one is of the engines that it would run.
_OWN = {
    "verdicts", "max_mismatch", "max_abs_diff", "max_k3", "max_boundaries", "min_coverage", "min_compared",
    "must_equal", "junit_out", "json_out", "config", "quiet",
}  # fmt: skip


def _read(context: typer.Context, paths: list[Path]) -> list[Subject]:
    for name in sorted(set(context.params) - _OWN):
        source = context.get_parameter_source(name)
        if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP"):
            option = next(o for p in context.command.params if p.name == name for o in p.opts)
            raise InputError(f"{option} would change nothing: {paths[0]} is judged as it is", "leave it out")
    return [read_subject(path) for path in paths]


def _run(context: typer.Context, rollout: str, train: str) -> Subject:
    from diffcheck.runs import run_localize

    settings = run_settings(context)
    with ProgressLine(Terminal(stderr=True)) as progress:
        verdict, _ = run_localize(settings, rollout, train, progress)
    return of_verdict(verdict, f"{rollout} against {train}, {settings.model}")
