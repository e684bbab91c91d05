"""Examine what the operators launch on a target: plan every call of the catalogue, compile it, apply every rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fastpath.backend import Plan, UnsupportedError, plan
from fastpath.machine_code.call import Call
from fastpath.machine_code.catalogue import calls
from fastpath.machine_code.code import Code, Resources, aligned_to_16, compile_plan, within_32_bits
from fastpath.machine_code.rules import RULES


@dataclass(frozen=True)
class Finding:
    """A rule that a kernel breaks."""

    rule: str
    says: str


@dataclass(frozen=True)
class Report:
    """One kernel as one call of the catalogue launches it."""

    #: Name of the call, e.g. ``attention/hopper-k16/bfloat16/decode``.
    call: str
    kernel: str
    contract_id: str
    target: str
    rules: tuple[str, ...]
    findings: tuple[Finding, ...]
    resources: Resources
    #: SHA-256 of the machine code without debug information, so that two reports can be compared.
    code_sha256: str


def check(code: Code) -> tuple[Finding, ...]:
    """Every finding of the rules of the code's runtime."""
    return tuple(Finding(rule.name, text) for rule in RULES[code.target.runtime] for text in rule.check(code))


def planned(arch: str, chosen: Iterable[Call]) -> Iterator[tuple[Call, Plan]]:
    """Each distinct launch of the calls that ``arch`` can execute; two calls that launch the same code count once."""
    seen = set()
    for call in chosen:
        with plan(arch) as launches:
            try:
                call.run()
            except UnsupportedError:
                if call.required_on(arch):
                    raise
                continue
        for launch in launches:
            key = identity(launch)
            if key not in seen:
                seen.add(key)
                yield call, launch


def examine(target: str, only: str = "") -> Iterator[Report]:
    """Compile every kernel and schedule for ``target`` and check it, one after the other.

    Args:
        target: ``gfx942`` or ``sm_90``.
        only: examine the calls whose name contains it (or one of several, by commas).

    Raises:
        UnsupportedError: unknown target, or a process that runs kernels in Triton's interpreter.
        ValueError: ``only`` selects nothing.
    """
    chosen = [call for call in calls() if any(part in call.name for part in only.split(","))]
    if not chosen:
        raise ValueError(f"only: no call has {only!r} in its name; known: {', '.join(call.name for call in calls())}")
    for call, launch in planned(target, chosen):
        yield _report(call, compile_plan(launch))


def _report(call: Call, code: Code) -> Report:
    rules = tuple(rule.name for rule in RULES[code.target.runtime])
    return Report(
        call=call.name,
        kernel=code.kernel,
        contract_id=code.contract.contract_id,
        target=code.target.arch,
        rules=rules,
        findings=check(code),
        resources=code.resources,
        code_sha256=code.sha256,
    )


def identity(launch: Plan) -> tuple[str, ...]:
    """What Triton compiles apart: two launches with one identity run the same code."""
    return (launch.kernel.fn.__qualname__, repr(launch.constants), repr(launch.options), _types(launch))


def _types(launch: Plan) -> str:
    return repr([_tensor(value) or _integer(value) or type(value) for value in launch.arguments])


def _tensor(value: object) -> str:
    """What the compiler knows of a tensor: its dtype, whether 32 bits reach all of it, and its alignment."""
    return f"{value.dtype} {within_32_bits(value)} {aligned_to_16(value)}" if isinstance(value, torch.Tensor) else ""


def _integer(value: object) -> str:
    """What the compiler knows of an integer argument: that it is 1, or a multiple of 16."""
    if type(value) is not int:
        return ""
    return "1" if value == 1 else "16" if value % 16 == 0 else "any"
