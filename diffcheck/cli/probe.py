"""``rlk-diff probe``: in which order, and in which arithmetic, does a kernel add?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from diffcheck.base.console import Terminal
from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.files import STANDARD_OUTPUT, check_writable, write_json
from diffcheck.base.progress import ProgressLine
from diffcheck.capture.adapter import package_versions
from diffcheck.cli.commands import app
from diffcheck.infer.active import FORMS, KERNELS, Answer, Kernel, load, named, probe, torch_kernel

_OWN = {"rich_help_panel": "Of module:function"}


@app.command("probe")
def probe_command(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KERNEL...", help=f"module:function, or of torch: {', '.join(KERNELS)}; none: all these."
        ),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--as", help="; ".join(f"{n}: {text}" for n, (text, _) in FORMS.items()), **_OWN)
    ] = None,
    length: Annotated[int | None, typer.Option("--length", min=2, help="Summands.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of the operands: float32, bfloat16, float16 or float64.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Of matmul and linear.")] = None,
    columns: Annotated[int | None, typer.Option("--columns", min=1, help="Of matmul and linear.")] = None,
    element: Annotated[str | None, typer.Option("--element", metavar="ROW,COLUMN", help="Which one to probe.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the answers, their whole trees too.")] = None,
) -> None:
    """Reveal the order in which a kernel adds, and the arithmetic of its sums, by designed inputs.

    Two summands that swamp all others cancel where they meet: what is counted tells the tree. Random sums then confirm
    order and arithmetic in every bit. Sums of positive terms alone (a softmax, a norm) cannot be probed this way.

    [bold]Examples[/bold]

      rlk-diff probe
      rlk-diff probe linear-bfloat16 --rows 1 --columns 4096
      rlk-diff probe torch:mv --as matmul --length 512
      rlk-diff probe mypackage.kernels:fused_sum --as sum --dtype bfloat16 --device cuda

    Exit codes: 0 order and arithmetic are found, 2 usage or environment error, 4 not for every kernel.
    """
    if json_out:
        check_writable(json_out)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("--device cuda: no GPU is visible to torch", "leave it out, or run where one is")
    elif device != "cpu":
        raise InputError(f"--device {device!r} is none of cpu, cuda", "choose one of cpu, cuda")
    changes = {"length": length, "dtype": dtype, "rows": rows, "columns": columns, "element": _element(element)}
    given = {name: value for name, value in changes.items() if value is not None}
    chosen = [_kernel(name, form, given, device) for name in kernels or KERNELS]
    # With the answers alone on standard output, what is told goes beside it.
    out = Terminal(stderr=json_out == STANDARD_OUTPUT)
    answers: list[Answer] = []
    for kernel in chosen:
        with ProgressLine(Terminal(stderr=True)) as progress:
            answers.append(probe(kernel, progress))
        out.print(_told(answers[-1]), soft_wrap=True)
    if json_out:
        write_json(json_out, {"schema": 1, **_machine(device), "answers": [answer.to_json() for answer in answers]})
    raise typer.Exit(max(answer.exit_code for answer in answers))


def _kernel(name: str, form: str | None, given: dict[str, Any], device: str) -> Kernel:
    if ":" in name:
        if form is None:
            raise InputError(f"{name}: how it is called is not said", f"add --as {'|'.join(FORMS)}")
        return torch_kernel(name, load(name), form, **{"length": 128, **given}, device=device)
    if form is not None:
        raise InputError(f"--as {form} would change nothing: {name} is called as it is listed", "leave --as out")
    return named(name, device, **given)


def _element(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        row, column = map(int, text.split(","))
    except ValueError:
        raise InputError(f"--element {text!r} is no ROW,COLUMN", "write two numbers, as 0,3") from None
    return row, column


def _told(answer: Answer) -> Text:
    found = answer.exit_code is ExitCode.EQUAL
    order = answer.order or "no order"
    arithmetic = " or ".join(map(str, answer.arithmetic)) or answer.outside
    confirmed = f" (0 of {answer.draws} random sums differ)" if found else ""
    return Text.assemble(
        (f"{answer.kernel.name}", "bold"),
        f" ({answer.kernel.form}): {order}; ",
        (arithmetic, "green" if found else "yellow"),
        confirmed,
    )


def _machine(device: str) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return {"versions": package_versions("torch", "numpy"), "device": name, "threads": torch.get_num_threads()}
