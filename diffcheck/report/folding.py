"""How a long list of boundaries becomes a short one: whole where it matters, a row a layer elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from diffcheck.base.recorded import RECORDED, Agreement, RecordedReport
from diffcheck.localize.verdict import BoundaryResult, FirstDivergence

#: Boundaries of an interval that are listed one by one.
_NAMED = 6


def folded(results: Sequence[BoundaryResult]) -> Iterator[list[BoundaryResult]]:
    """Rows of a table: neighbours of one status share one, except near the first divergence, where each has its own.

    What lies after the layer of the first divergence only receives; there one row a layer is enough.
    """
    detailed = layer_in_full(results)
    for status, members in groupby(results, key=lambda r: r.status):
        run = list(members)
        if status == "origin":
            yield from ([r] for r in run)
            continue
        for layer, part in groupby(run, key=lambda r: layer_of(r.name) if status == "receiver" else ""):
            group = list(part)
            if status == "receiver" and (layer == detailed or layer is None):
                yield from ([r] for r in group)
            else:
                yield group


def layer_in_full(results: Sequence[BoundaryResult]) -> str | None:
    """The layer of the first origin; None where nothing diverges, or not in a layer."""
    first = next((r.name for r in results if r.status == "origin"), "")
    return layer_of(first)


def layer_of(name: str) -> str | None:
    """The layer's number in a boundary's name, or None outside the layers."""
    parts = name.split(".")
    return parts[1] if parts[0] == "layers" else None


def within_layer(name: str) -> str:
    """A boundary's name without its layer: ``layers.3.self_attn.q_proj`` is ``self_attn.q_proj``."""
    return name.split(".", 2)[2] if layer_of(name) is not None else name


def span_of(names: Sequence[str]) -> str:
    """One name for neighbouring boundaries; a whole layer is called by its number."""
    first, last = names[0], names[-1]
    if layer_of(first) is None or layer_of(first) != layer_of(last):
        return f"{first} … {last}"
    if within_layer(first) == "input_layernorm" and within_layer(last) == "mlp_residual":
        return f"layers.{layer_of(first)}"
    return f"{first} … {within_layer(last)}"


def short_count(number: int) -> str:
    """Distances across zero are huge: three digits and a power of ten tell as much."""
    return f"{number:,}" if number < 100_000 else f"{number:.2e}"


def share(result: BoundaryResult) -> str:
    """How many elements differ, in words; how many rows, where only digests were compared."""
    if result.differing is None:
        return "1 row" if result.rows_differing == 1 else f"{result.rows_differing:,} rows"
    if result.differing <= 1:
        return "1 element" if result.differing else "0"
    return f"{100 * result.differing / max(1, result.elements):.3g} %"


def equal_before(first: FirstDivergence) -> str:
    """What was compared and found equal before the first divergence."""
    boundaries = "1 boundary" if first.equal_before == 1 else f"{first.equal_before:,} boundaries"
    return f"{boundaries}, {first.equal_elements_before:,} elements"


def interval_in_short(first: FirstDivergence) -> str:
    """The boundaries among which the divergence arose; of many, the ends."""
    names = first.interval
    if len(names) <= _NAMED:
        return " → ".join(names)
    return f"{names[0]} → … → {names[-1]} ({len(names)} boundaries)"


def record_in_words(report: RecordedReport) -> str:
    """What the samples carried."""
    without = f"; {report.without:,} samples without" if report.without else ""
    return (
        f"Recorded logprobs: {report.values:,} of {report.samples:,} samples, "
        f"written down as {report.resolution}{without}"
    )


def worst_in_words(found: Agreement) -> str:
    """Where the largest difference is, and how many exceed the record's own rounding."""
    if found.worst is None:
        return ""
    sample, index = found.worst
    beyond = (
        "" if found.beyond_rounding == found.stats.mismatch_count else f"; {found.beyond_rounding:,} beyond rounding"
    )
    return f"; largest at sample {sample}, response token {index}{beyond}"


def by_reason(unobserved: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> the boundaries that were not observed for it."""
    grouped: dict[str, list[str]] = {}
    for name, reason in unobserved.items():
        grouped.setdefault(reason, []).append(name)
    return grouped


def side_in_words(side: dict[str, Any]) -> str:
    """What ran on one side, from ``verdict.evidence``: engine, versions, ranks, dtype, phase, profile."""
    if side["engine"] == RECORDED:
        ran = side["evidence"]
        return f"{RECORDED}: {ran['values']:,} logprobs of {ran['file']}, written down as {ran['written_as']}"
    versions = ", ".join(f"{name} {number}" for name, number in side["versions"].items())
    words = [
        f"{side['engine']} ({versions})" if versions else side["engine"],
        f"TP {side['tensor_parallel']}",
        side["dtype"],
        side["phase"],
    ]
    if profile := side["evidence"].get("profile"):
        words.append(profile)
    return ", ".join(words)
