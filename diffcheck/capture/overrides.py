"""``--override``: change one side on purpose, in one line of text.

``[rollout/|train/]TARGET: FIELD=VALUE``; without a side it is the train side that changes. Targets:

- a boundary or pattern with a contract field, for engines that follow a contract:
  ``layers.*.mlp.act: rounding.silu=bfloat16``
- a boundary with ``flip=SAMPLE,POSITION,INDEX[,BIT]``: one bit of the live value
- ``weights.NAME`` with ``flip=INDEX[,BIT]``: one bit of a weight before it is loaded
- ``object`` with ``temperature``, ``top_p``, ``top_k``, ``rope_theta``, ``weight_version``, ``position_offset`` or
  ``swap_tokens=SAMPLE,I,J``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.switches import table_of
from reference.contract.names import offered

_REMEDY = "write it as '[rollout/|train/]TARGET: FIELD=VALUE'; see rlk-diff localize --help"
_PLAN_FIELDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "weight_version": int,
    "position_offset": int,
}
_PLAN_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (1e-6, 1e6),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31 - 1),
    "position_offset": (-(2**31), 2**31 - 1),
}
_OBJECT_FIELDS = (*_PLAN_FIELDS, "rope_theta", "swap_tokens")


@dataclass(frozen=True)
class Override:
    """One parsed override."""

    side: str
    target: str
    field: str
    value: str
    text: str

    def integers(self, counts: tuple[int, ...]) -> list[int]:
        """The value as comma-separated integers, of one of the allowed ``counts``."""
        try:
            numbers = [int(part) for part in self.value.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in counts or min(numbers) < 0:
            expected = " or ".join(map(str, counts))
            raise InputError(f"override {self.text!r}: {self.field} takes {expected} integers", _REMEDY)
        return numbers


def parse_override(text: str) -> Override:
    """Parse one override.

    Raises:
        InputError: malformed, or an unknown side.
    """
    target, colon, assignment = text.partition(":")
    field, equals, value = assignment.partition("=")
    target, field, value = target.strip(), field.strip(), value.strip()
    if not (colon and equals and target and field and value):
        raise InputError(f"override {text!r} is malformed", _REMEDY)
    side, slash, rest = target.partition("/")
    if not slash:
        side, rest = "train", target
    if side not in ("rollout", "train"):
        raise InputError(f"override {text!r}: side {side!r} is neither rollout nor train", _REMEDY)
    return Override(side, rest, field, value, text)


def apply_overrides(
    overrides: Sequence[Override], options: EngineOptions, plan: CapturePlan
) -> tuple[EngineOptions, CapturePlan]:
    """Fold the overrides of one side into what its engine will be told.

    Raises:
        InputError: unknown object field, a value of the wrong type, or a contract field for an engine that follows no
            contract.
    """
    for override in overrides:
        if override.target == "object":
            options, plan = _object(override, options, plan)
        elif override.target.startswith("weights."):
            options = _weight(override, options)
        elif override.field == "flip":
            numbers = override.integers((3, 4))
            flip = BitFlip(override.target, *numbers)
            plan = replace(plan, interventions=(*plan.interventions, flip))
        else:
            plan = _contract(override, options, plan)
    return options, plan


def _object(o: Override, options: EngineOptions, plan: CapturePlan) -> tuple[EngineOptions, CapturePlan]:
    if o.field == "swap_tokens":
        sample, i, j = o.integers((3,))
        swapped = _swapped(o, plan.samples, sample, i, j)
        done = (f"object: swap_tokens = {sample},{i},{j}",) if swapped != plan.samples else ()
        return options, replace(plan, samples=swapped, changes=(*plan.changes, *done))
    if o.field == "rope_theta":
        return replace(options, model_overrides={**options.model_overrides, "rope_theta": _number(o, float)}), plan
    if o.field in _PLAN_FIELDS:
        value = _number(o, _PLAN_FIELDS[o.field])
        low, high = _PLAN_RANGES.get(o.field, (-math.inf, math.inf))
        if not low <= value <= high:
            raise InputError(f"override {o.text!r}: {o.field} is out of range", f"choose from {low} to {high}")
        # The offset is told by whoever applies it.
        is_news = value != getattr(plan, o.field) and o.field != "position_offset"
        done = (f"object: {o.field} = {value}",) if is_news else ()
        return options, replace(plan, **{o.field: value}, changes=(*plan.changes, *done))
    if o.field in table_of(options.engine):
        raise InputError(
            f"override {o.text!r}: {o.field} is a switch of {options.engine}, not of the object",
            f"give it as --{o.side}-option {o.field}={o.value}",
        )
    raise InputError(f"override {o.text!r}: object has no field {o.field!r}", offered(o.field, _OBJECT_FIELDS))


def _number(o: Override, kind: type) -> Any:
    try:
        value = kind(o.value)
        if not math.isfinite(value):
            raise ValueError
        return value
    except ValueError:
        raise InputError(
            f"override {o.text!r}: {o.value!r} is not a {'finite ' * (kind is float)}{kind.__name__}", _REMEDY
        ) from None


def _swapped(o: Override, samples: tuple[Sample, ...], index: int, i: int, j: int) -> tuple[Sample, ...]:
    if index >= len(samples) or max(i, j) >= len(samples[index].token_ids):
        raise InputError(f"override {o.text!r}: no such sample or token", "count from 0")
    sample = samples[index]
    ids = list(sample.token_ids)
    ids[i], ids[j] = ids[j], ids[i]
    cut = len(sample.prompt_token_ids)
    changed = replace(sample, prompt_token_ids=tuple(ids[:cut]), response_token_ids=tuple(ids[cut:]))
    return (*samples[:index], changed, *samples[index + 1 :])


def _weight(o: Override, options: EngineOptions) -> EngineOptions:
    if o.field != "flip":
        raise InputError(f"override {o.text!r}: a weight takes flip=INDEX[,BIT]", _REMEDY)
    index, *bit = o.integers((1, 2))
    flip = (o.target.removeprefix("weights."), index, bit[0] if bit else 0)
    return replace(options, weight_flips=(*options.weight_flips, flip))


def _contract(o: Override, options: EngineOptions, plan: CapturePlan) -> CapturePlan:
    if options.engine != "reference":
        raise InputError(
            f"override {o.text!r}: {options.engine} runs its own kernels and follows no contract that could be changed",
            "override a contract field on a side whose engine is reference, or use flip= on a real engine",
        )
    fields = {**plan.contract_overrides.get(o.target, {}), o.field: _literal(o.value)}
    return replace(plan, contract_overrides={**plan.contract_overrides, o.target: fields})


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
