"""Contracts as data: what an operator's arithmetic is, down to the last bit.

A contract is a frozen dataclass with six groups of fields, and the operator *interprets* it: there is no other place
where an order, a precision or a rounding point is chosen.

==========  ==========================================================================================
group       says
==========  ==========================================================================================
domain      which elements an output depends on, and what the inputs may be
partition   into which parts a reduction is cut (segments, blocks, splits)
order       in which order the parts are merged
precision   the format in which intermediates are held
rounding    where a value is narrowed, and to which format
primitives  which sequence of operations stands for exp, rsqrt, a matrix unit, ...
==========  ==========================================================================================

Every field is declared with :func:`choice`: its default, its finite set of values, and words for each value. The set
is what :mod:`reference.contract.space` enumerates; the words are what :mod:`reference.contract.diff` says.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from reference.contract.names import offered

GROUPS = ("domain", "partition", "order", "precision", "rounding", "primitives")
SCHEMA = 1  # version of the JSON form; a change of meaning of any field raises it

Value = str | int | bool


@dataclass(frozen=True)
class Choice:
    """What one contract field may be.

    Attributes:
        values: every allowed value, the default first.
        phrase: a verb phrase about the operator with ``{value}``, or one phrase per value; ``diff`` and ``show`` print
            it.
        equivalent: the inputs on which some value changes no bit ("" if none are common): a reason that inference can
            give, and no reason for a test, which finds an input on which the value does.
        given: a fact of the model or the call, known before any arithmetic is looked at: inference does not search it.
        added: the field came after contracts of its operator were in use: its default is what they always did, and is
            left out of the canonical JSON, so that they keep their ``contract_id``.
    """

    values: tuple[Value, ...]
    phrase: str | Mapping[Any, str]
    equivalent: str = ""
    given: bool = False
    added: bool = False

    def words(self, value: Value) -> str:
        """The phrase for ``value``."""
        text = self.phrase if isinstance(self.phrase, str) else self.phrase.get(value, "uses {value}")
        return text.format(value=value)


def choice(
    values: Sequence[Value],
    phrase: str | Mapping[Any, str],
    equivalent: str = "",
    given: bool = False,
    added: bool = False,
) -> Any:
    """Declare a contract field: the first of ``values`` is the default. See :class:`Choice`."""
    chosen = Choice(tuple(values), phrase, equivalent, given, added)
    return dataclasses.field(default=values[0], metadata={"choice": chosen})


def format_choice(
    default: str, kept: str, rounded: str = "", equivalent: str = "", given: bool = False, added: bool = False
) -> Any:
    """Declare a field that names the format of a value in the model's data path.

    Args:
        default: ``bfloat16`` or ``float32``; float16 is the third.
        kept: the words for float32, or for every format (with ``{value}``) if ``rounded`` is empty.
        rounded: the words for the narrow formats, with ``{value}``.
    """
    values = ("bfloat16", "float16", "float32") if default == "bfloat16" else ("float32", "bfloat16", "float16")
    words = {"float32": kept, "bfloat16": rounded, "float16": rounded} if rounded else kept
    return choice(values, words, equivalent, given, added)


@dataclass(frozen=True)
class Group:
    """A group of contract fields. An operator that has nothing to say about a group leaves it empty."""


@dataclass(frozen=True)
class Contract:
    """Base of all contracts. Subclasses set ``operator`` and replace the groups they use.

    Raises ValueError on construction for a value outside its set and, through :meth:`check`, for an impossible
    combination; TypeError for a group of another contract.
    """

    operator: ClassVar[str]

    domain: Group = Group()
    partition: Group = Group()
    order: Group = Group()
    precision: Group = Group()
    rounding: Group = Group()
    primitives: Group = Group()

    def __init_subclass__(cls) -> None:
        (GRADIENTS if cls.operator.endswith(BACKWARD) else CONTRACTS)[cls.operator] = cls

    def __post_init__(self) -> None:
        for group, expected in group_types(type(self)).items():
            given = type(getattr(self, group))
            if given is not expected:
                raise TypeError(f"{self.operator}: {group} must be a {expected.__qualname__}, got {given.__qualname__}")
        for path, allowed in fields(type(self)).items():
            _check_value(self.operator, path, self.get(path), allowed)
        self.check()

    def check(self) -> None:
        """Raise ValueError if fields contradict each other, or if a field set off its default cannot matter."""

    def get(self, path: str) -> Value:
        """Value at ``path``, e.g. ``"rounding.output"``. Raises ValueError for an unknown path."""
        group, name = split_path(type(self), path)
        value: Value = getattr(getattr(self, group), name)
        return value

    def override(self, path: str, value: Value) -> Self:
        """A copy with one field changed. Raises ValueError for an unknown path, value or combination."""
        return self.replace({path: value})

    def replace(self, changes: Mapping[str, Value]) -> Self:
        """A copy with several fields changed at once (combinations are checked only at the end)."""
        groups: dict[str, dict[str, Value]] = {}
        for path, value in changes.items():
            group, name = split_path(type(self), path)
            groups.setdefault(group, {})[name] = value
        return dataclasses.replace(
            self, **{g: dataclasses.replace(getattr(self, g), **new) for g, new in groups.items()}
        )

    def with_dtype(self, dtype: str) -> Self:
        """The contract for a model held in ``dtype``. Raises ValueError for an unknown one."""
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {dtype!r}")
        return self.replace(self.dtype_changes(dtype))

    def dtype_changes(self, dtype: str) -> dict[str, Value]:
        """What ``with_dtype`` changes: every bfloat16 of domain, precision and rounding becomes ``dtype``."""
        changes: dict[str, Value] = {}
        for path in fields(type(self)):
            if path.split(".")[0] in ("domain", "precision", "rounding") and self.get(path) == "bfloat16":
                changes[path] = dtype
        return changes

    def as_dict(self) -> dict[str, Any]:
        """Plain nested data: schema, operator, and all six groups; an added field only where it is off its default."""
        groups = {group: dataclasses.asdict(getattr(self, group)) for group in GROUPS}
        for path, allowed in fields(type(self)).items():
            group, name = path.split(".")
            if allowed.added and self.get(path) == allowed.values[0]:
                del groups[group][name]
        return {"schema": SCHEMA, "operator": self.operator, **groups}

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII. Equal contracts have equal text."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def contract_id(self) -> str:
        """SHA-256 of the canonical JSON, 64 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode("ascii")).hexdigest()


CONTRACTS: dict[str, type[Contract]] = {}  # operator name -> contract class; filled as operators are defined
#: The same of gradients: the name of what is differentiated and this suffix. Filled by ``reference.gradients``.
GRADIENTS: dict[str, type[Contract]] = {}
BACKWARD = "_backward"
# Answers of the two functions below, which every construction of a contract asks: a search constructs thousands.
_GROUP_TYPES: dict[type[Contract], dict[str, type[Group]]] = {}
_FIELDS: dict[type[Contract], dict[str, Choice]] = {}


def group_types(contract: type[Contract]) -> dict[str, type[Group]]:
    """Group name -> the dataclass that holds its fields. Not to be changed: the answer is kept."""
    if contract not in _GROUP_TYPES:
        _GROUP_TYPES[contract] = {f.name: type(f.default) for f in dataclasses.fields(contract)}  # type: ignore[misc]
    return _GROUP_TYPES[contract]


def fields(contract: type[Contract]) -> dict[str, Choice]:
    """Every field of a contract class: path -> its choice, in the order of declaration. Not to be changed."""
    if contract not in _FIELDS:
        _FIELDS[contract] = {f"{group}.{field.name}": field.metadata["choice"] for group, field in _walk(contract)}
    return _FIELDS[contract]


def _walk(contract: type[Contract]) -> Iterator[tuple[str, Any]]:
    for group, kind in group_types(contract).items():
        for field in dataclasses.fields(kind):
            yield group, field


def split_path(contract: type[Contract], path: str) -> tuple[str, str]:
    """Split ``"group.field"``. Raises ValueError naming the paths that exist."""
    known = fields(contract)
    if path not in known:
        raise ValueError(f"{contract.operator} has no contract field {path!r}; {offered(path, known)}")
    group, name = path.split(".")
    return group, name


def _check_value(operator: str, path: str, value: object, allowed: Choice) -> None:
    # type() and not ==: True == 1, and a contract that says 1 must not turn into one that says true.
    if not any(type(value) is type(v) and value == v for v in allowed.values):
        values = ", ".join(repr(v) for v in allowed.values)
        raise ValueError(f"{operator}: {path} must be one of {values}; got {value!r}")


def from_json(text: str) -> Contract:
    """Read a contract from JSON text (canonical or not).

    Raises ValueError naming the offending key for malformed text, another schema, an unknown operator, a missing or
    unknown group or field, a value outside its set or an impossible combination.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"contract is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"contract must be a JSON object, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"contract schema must be {SCHEMA}, got {data.get('schema')!r}")
    name = str(data.get("operator"))
    kind = CONTRACTS.get(name) or GRADIENTS.get(name)
    if kind is None:
        raise ValueError(f"unknown operator {data.get('operator')!r}; {offered(name, sorted(CONTRACTS))}")
    _same_keys(f"{kind.operator} contract", data, ("schema", "operator", *GROUPS))
    groups = {}
    for group, group_type in group_types(kind).items():
        if not isinstance(data[group], dict):
            raise ValueError(f"{kind.operator}: {group} must be an object, got {type(data[group]).__name__}")
        own = dataclasses.fields(group_type)
        given = {f.name: f.default for f in own if f.metadata["choice"].added} | data[group]
        _same_keys(f"{kind.operator}: {group}", given, [f.name for f in own])
        groups[group] = group_type(**given)
    return kind(**groups)


def _same_keys(where: str, data: Mapping[str, object], expected: Sequence[str]) -> None:
    if unknown := sorted(set(data) - set(expected)):
        raise ValueError(f"{where} has unknown field {unknown[0]!r}; expected {', '.join(expected) or 'none'}")
    if missing := sorted(set(expected) - set(data)):
        raise ValueError(f"{where} lacks field {missing[0]!r}")


def override(contract: Contract, path: str, value: Value) -> Contract:
    """``contract`` with ``path`` set to ``value``. See :meth:`Contract.override`."""
    return contract.override(path, value)


def describe(contract: Contract) -> str:
    """The contract as text for a kernel author: one line per field, what it is and what that means."""
    lines = [f"{contract.operator}   contract {contract.contract_id[:16]}"]
    summary = inspect.cleandoc(type(contract).__doc__ or "")
    lines += ["", *summary.splitlines()] if summary else []
    last = ""
    for path, allowed in fields(type(contract)).items():
        group, name = path.split(".")
        if group != last:
            lines += ["", group]
            last = group
        value = contract.get(path)
        lines.append(f"  {name:<18} {value!s:<16} {allowed.words(value)}")
    return "\n".join(lines)
