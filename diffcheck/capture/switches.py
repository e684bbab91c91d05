"""Switches of the engines: what each is, which values it takes, and how the command line says it.

Every adapter has a table ``EXTRA`` of them. ``EngineOptions.extra`` holds those that were asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.base.samples import UNSUPPORTED_SAMPLING
from diffcheck.capture.adapter import ENGINES
from reference.contract.names import offered

#: Module of each engine that holds its table.
_TABLES = {
    "vllm": "diffcheck.capture.vllm.engine",
    "megatron": "diffcheck.capture.megatron.adapter",
    "transformers": "diffcheck.capture.transformers.adapter",
    "reference": "diffcheck.capture.reference",
}
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Switch:
    """One switch of an engine."""

    #: int, float, bool, str, or list (of texts).
    kind: type
    #: None: the engine chooses.
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    least: float | None = None

    def parse(self, text: str) -> Any:
        """The value that ``text`` says.

        Raises:
            ValueError: it is none; what it should be is said.
        """
        value: Any
        if self.kind is bool:
            if text.lower() not in _TRUTH:
                raise ValueError("true or false")
            return _TRUTH[text.lower()]
        if self.kind is list:
            return [part.strip() for part in text.split(",") if part.strip()]
        try:
            value = self.kind(text)
        except ValueError:
            raise ValueError({int: "an integer", float: "a number"}[self.kind]) from None
        if self.choices and value not in self.choices:
            raise ValueError(f"one of {', '.join(self.choices)}")
        if self.least is not None and not value >= self.least:
            raise ValueError(f"at least {self.least}")
        return value


def table_of(engine: str) -> Mapping[str, Switch]:
    """The switches of ``engine`` by name; starts nothing."""
    table: Mapping[str, Switch] = importlib.import_module(_TABLES[engine]).EXTRA
    return table


def parse_switches(engine: str, pairs: Sequence[str], option: str) -> dict[str, Any]:
    """``NAME=VALUE`` texts as `EngineOptions.extra` of ``engine``.

    Args:
        option: how the command line calls them, for messages.

    Raises:
        InputError: malformed, given twice, of another engine, a way of sampling that no contract has, or a value that
            the switch does not take.
    """
    table = table_of(engine)
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not name or not text:
            raise InputError(f"{option} {pair!r} is malformed", f"write {option} NAME=VALUE; see rlk-diff engines")
        if name in found:
            raise InputError(f"{option} {name} is given twice", "give it once")
        check_known(engine, name, table)
        try:
            found[name] = table[name].parse(text)
        except ValueError as expected:
            raise InputError(f"{option} {pair}: {text!r} is not {expected}", "see rlk-diff engines") from None
    return found


def check_known(engine: str, name: str, table: Mapping[str, Switch]) -> None:
    """Raises:
    InputError: ``engine`` has no switch ``name``; whose it is, or why nobody has it, is said.
    """
    if name in table:
        return
    if name in UNSUPPORTED_SAMPLING:
        raise InputError(
            f"{engine}: {name} is not supported: it {UNSUPPORTED_SAMPLING[name]}",
            "sample with --temperature, --top-p and --top-k alone",
        )
    others = [other for other in ENGINES if other != engine and name in table_of(other)]
    whose = f"; {' and '.join(others)} has it" if others else ""
    raise InputError(
        f"{engine}: option {name!r} is unknown{whose}", f"{offered(name, table)}; rlk-diff engines lists them"
    )


def defaults(table: Mapping[str, Switch], given: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Every switch of ``table`` with its value: as ``given``, else its default.

    Raises:
        InputError: see `check_known`.
    """
    for name in given:
        check_known(engine, name, table)
    return {**{name: switch.default for name, switch in table.items()}, **given}
