"""``rlk-diff contract``: read contracts as a kernel author does."""

from __future__ import annotations

from typing import Annotated

import typer

from diffcheck.base.console import Terminal, listing
from diffcheck.base.errors import InputError
from reference.contract import CONTRACTS, Contract, Profile, describe, operator_name, profiles
from reference.contract import diff as differences
from reference.contract import profile as find_profile

app = typer.Typer(help="Show, list and compare numerical contracts.", no_args_is_help=True)
_Operator = Annotated[str, typer.Argument(help="An operator, e.g. rms_norm.")]
_Dtype = Annotated[str, typer.Option("--dtype", help="dtype of the model: bfloat16, float16 or float32.")]


def _profile(name: str) -> Profile:
    try:
        return find_profile(name)
    except ValueError as error:
        raise InputError(str(error), "list them with rlk-diff contract list") from None


def _contract(profile: Profile, operator: str, dtype: str) -> Contract:
    try:
        return profile.contract(operator, dtype)
    except ValueError as error:
        raise InputError(str(error), "list operators with rlk-diff contract list") from None


@app.command("list")
def list_all() -> None:
    """List profiles, and every operator with its contract under strict-v1.

    [bold]Example[/bold]

      rlk-diff contract list
    """
    console = Terminal()
    known = listing("profile", "arithmetic", "what it is", names=2, title="Profiles")
    for name in profiles.names():
        p = find_profile(name)
        known.add_row(name, p.arithmetic, p.evidence)
    console.print_list(known)
    strict = find_profile("strict-v1")
    operators = listing("operator", "contract (strict-v1, bfloat16)", names=2, title="\nOperators")
    for name in sorted(CONTRACTS):
        operators.add_row(name, strict.contract(name).contract_id[:16])
    console.print_list(operators)


@app.command()
def show(
    operator: _Operator,
    profile: Annotated[str, typer.Argument(help="A profile, e.g. strict-v1.")] = "strict-v1",
    dtype: _Dtype = "bfloat16",
    json: Annotated[bool, typer.Option("--json", help="Canonical JSON, the form that contract_id hashes.")] = False,
) -> None:
    """Print the contract of one operator, field by field, in words.

    [bold]Examples[/bold]

      rlk-diff contract show rms_norm strict-v1
      rlk-diff contract show attention strict-v1/mfma-cdna3-g8 --json
    """
    chosen = _profile(profile)
    contract = _contract(chosen, operator, dtype)
    if json:
        typer.echo(contract.to_json())
        return
    typer.echo(describe(contract))
    if reason := chosen.unmodelled.get(operator_name(operator)):
        typer.echo(f"\nnot fully modelled: {reason}")


@app.command("diff")
def compare(
    operator: _Operator,
    left: Annotated[str, typer.Argument(help="A profile.")],
    right: Annotated[str, typer.Argument(help="Another profile.")],
    dtype: _Dtype = "bfloat16",
) -> None:
    """Say in words in which fields two profiles' contracts of one operator differ.

    [bold]Example[/bold]

      rlk-diff contract diff rms_norm strict-v1 vllm-0.32-cpu
    """
    a, b = _profile(left), _profile(right)
    found = differences(_contract(a, operator, dtype), _contract(b, operator, dtype), left, right)
    if not found:
        typer.echo(f"{left} and {right} have the same contract for {operator_name(operator)}.")
    for difference in found:
        typer.echo(f"{difference.path}: {difference.sentence}")
    for name, p in ((left, a), (right, b)):
        if reason := p.unmodelled.get(operator_name(operator)):
            typer.echo(f"{name} is not fully modelled: {reason}")
