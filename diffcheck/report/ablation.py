"""The ablation's part of a verdict's page, from `diffcheck.ablate.result.Ablation` as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from diffcheck.report.charts import svg, tag, text
from diffcheck.report.folding import short_count
from diffcheck.report.page import Row, both_widths, breakable, brief


def section(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows of one ablation."""
    return {
        "data": data,
        "status": {"explained": "equal", "remainder": "origin"}.get(data["status"], "receiver"),
        "facts": list(_facts(data)),
        "walk": both_widths(lambda width: _walk(data, width)) if any(o["after"] for o in data["origins"]) else "",
        "origins": list(_origins(data["origins"])),
        "units": [_unit(u) for u in data["units"]],
        "causes": _causes(data["units"]),
        "notes": _notes(data["units"]),
        "pairs": [
            Row([Markup(" + ").join(_name(n) for n in p["units"]), *map(percent, p["alone"]), _removed(p["trial"])])
            for p in data["pairs"]
        ],
        "unaligned": [Row([name, reason]) for name, reason in data["unaligned"].items()],
    }


def _causes(units: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """(what differs in words, the operators where it does); then what could not be said."""
    found: dict[str, list[Markup]] = {}
    for unit in units:
        sentences = [d["sentence"] for d in unit["differs_in"]]
        for sentence in [*sentences, *filter(None, [unit["unexplained"]])]:
            found.setdefault(sentence, []).append(_name(unit["name"]))
    return [(sentence, Markup(", ").join(names)) for sentence, names in found.items()]


def _notes(units: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of single forwards."""
    trials = [trial for unit in units for trial in (unit["alone"], unit["left_out"]) if trial]
    notes = {trial["note"] for trial in trials if trial["note"]}
    notes |= {f"Too deep to leave out whole: left out at {t['place']} only." for t in trials if t["place"]}
    if any(trial["evidence"] == "unproven" for trial in trials):
        notes.add("? marks a forward in which the borrowed operator's bits could not be proven for all rows.")
    return sorted(notes)


def _facts(data: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    base = data["baseline"]
    yield (
        "what was done",
        f"operators of {data['donor']} put into the live forward of {data['host']} ({data['host_side']})",
    )
    yield "before", _logprobs(base)
    if data["together"] is not None:
        yield "with the set aligned", _logprobs(data["together"]["logprobs"])
    if data["minimal"]:
        proof = (
            "dropping any one of them leaves a mismatch" if data["minimal_verified"] else "not shown to be the least"
        )
        yield "minimal set", Markup("{} ({})").format(Markup(", ").join(map(_name, data["minimal"])), proof)
    if data["reason"]:
        yield "what is missing", data["reason"]
    runs = ", ".join(f"{engine} {n}" for engine, n in data["runs"].items())
    yield "cost", f"engine runs: {runs or 'none'}; {data['seconds']:.0f} s"


def _logprobs(s: Mapping[str, Any]) -> str:
    words = f"{s['mismatch_count']:,} of {s['compared']:,} logprobs differ"
    if not s["mismatch_count"]:
        return words
    return f"{words}, max |Δ| {brief(_number(s['max_abs_diff']))}, mean |Δ| {brief(_number(s['mean_abs_diff']))} nats"


def _number(value: Any) -> float:
    """JSON holds what is not finite as text."""
    return float(value)


def _name(name: str) -> Markup:
    return tag("code", breakable(name))


def _origins(origins: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """A row an origin; neighbours that the plan did not run share one."""
    numbered = list(enumerate(origins, 1))
    for ran, group in groupby(numbered, key=lambda item: item[1]["after"] is not None):
        members = list(group)
        if ran or len(members) == 1:
            yield from (_origin(number, origin) for number, origin in members)
        else:
            span = f"{members[0][0]} to {members[-1][0]}"
            yield Row([span, f"{len(members)} origins, without a forward of their own", "", "", "–", "–", "–"])


def _origin(number: int, origin: Mapping[str, Any]) -> Row:
    part = 100 * origin["differing"] / max(1, origin["elements"])
    after = origin["after"]
    name: object = " → ".join(origin["interval"]) or origin["boundary"]
    if origin["confirmed"] is False:
        note = tag("span", "another boundary differs first after it", class_="muted")
        name = Markup("{}<br>{}").format(breakable(name), note)
    return Row(
        [
            str(number),
            name,
            f"{part:.3g} %",
            short_count(origin["max_ulp"]),
            "–" if after is None else f"{after['mismatch_count']:,} of {after['compared']:,}",
            "–" if after is None else brief(_number(after["mean_abs_diff"])),
            percent(origin["explained"]),
        ]
    )


def _unit(unit: Mapping[str, Any]) -> Row:
    part = 100 * unit["differing"] / max(1, unit["elements"])
    left_out = unit["left_out"]
    return Row(
        [
            tag("strong", "●", title="in the minimal set") if unit["in_minimal"] else "",
            unit["name"],
            f"{part:.3g} %",
            short_count(unit["max_ulp"]),
            _removed(unit["alone"]),
            "–" if left_out is None else percent(1 - _number(left_out["removed"]["mean"])) + _mark(left_out),
        ]
    )


def _removed(trial: Mapping[str, Any] | None) -> str:
    """Share of the mean |Δ logprob| that a trial removed."""
    return "–" if trial is None else percent(trial["removed"]["mean"]) + _mark(trial)


def _mark(trial: Mapping[str, Any]) -> str:
    return " ?" if trial["evidence"] == "unproven" else ""


def percent(share: float | str | None) -> str:
    """Three digits, but never all or nothing where it is not."""
    if share is None:
        return "–"
    value = 100 * _number(share)
    if 99.95 <= value < 100:
        return "> 99.9 %"
    if 0 < abs(value) < 0.1:
        return "< 0.1 %" if value > 0 else "> −0.1 %"
    return f"{value:.3g} %".replace("-", "−")


def _walk(data: Mapping[str, Any], width: int) -> Markup:
    """Mean |Δ logprob| that is left after each origin is aligned, as bars from the baseline down."""
    steps = [("nothing aligned", _number(data["baseline"]["mean_abs_diff"]))]
    steps += [
        ("+ " + (" → ".join(o["interval"]) or o["boundary"]), _number(o["after"]["mean_abs_diff"]))
        for o in data["origins"]
        if o["after"]
    ]
    high = max(value for _, value in steps) or 1.0
    narrow = width < 500
    left, right = (0.0, 58.0) if narrow else (300.0, 70.0)
    body: list[Markup] = []
    pitch = 38.0 if narrow else 22.0
    for i, (name, value) in enumerate(steps):
        y = i * pitch + (16.0 if narrow else 0.0)
        label = text(0, y - 4, name, class_="code") if narrow else text(left - 8, y + 12, name, "end", "code")
        long = (width - left - right) * value / high
        body += [label, tag("line", x1=left, x2=left, y1=y, y2=y + 16, class_="axis")]
        if value:
            body.append(tag("rect", x=left, y=y + 2, width=max(1.0, long), height=12.0, class_="bar s2"))
        body.append(text(left + long + 6, y + 12, brief(value) if value else "0, equal in every bit"))
    return svg(width, len(steps) * pitch + 2, "Mean logprob difference left after each step", *body)
