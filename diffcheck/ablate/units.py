"""What is aligned together: an operator over all layers, because a cause is usually a kind; or, where few boundaries
differ, each by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from diffcheck.ablate.result import Origin, Unit
from diffcheck.base.bits import Difference
from diffcheck.base.boundaries import Boundary
from diffcheck.base.samples import Sample
from diffcheck.localize.compare import compare_boundary
from diffcheck.rows import expected_rows
from diffcheck.trace.reader import Trace

#: Up to this many differing boundaries each is a unit of its own.
FEW = 6
_LAYER = re.compile(r"^layers\.\d+\.")


def kind_of(boundary: str) -> str:
    """``layers.*.mlp.act`` for ``layers.3.mlp.act``."""
    return _LAYER.sub("layers.*.", boundary)


def grouped(boundaries: Sequence[str]) -> dict[str, list[str]]:
    """Units by name. A boundary that is the only one of its kind keeps its own name."""
    kinds: dict[str, list[str]] = {}
    for name in boundaries:
        kinds.setdefault(name if len(boundaries) <= FEW else kind_of(name), []).append(name)
    return {members[0] if len(members) == 1 else kind: members for kind, members in kinds.items()}


def origins(
    nodes: Sequence[Boundary], names: Sequence[str], donor: Trace, given: Trace
) -> tuple[list[Origin], dict[str, Difference]]:
    """Every boundary at which the host's operator, on the donor's inputs, gave other bits than the donor's.

    Args:
        names: boundaries at which the donor's values were put in.
        given: what the host's operators gave before that.

    Returns:
        The origins in dataflow order, and the difference at each of them.
    """
    rows = expected_rows([Sample.from_json(s) for s in donor.header.samples])
    found, differences = [], {}
    for node in nodes:
        if node.name not in names:
            continue
        compared = compare_boundary(node, donor, given, len(rows[node.rows]))
        if not compared.rows.any():
            continue
        d = compared.difference
        assert d is not None
        row = int(compared.rows.argmax())
        place = rows[node.rows]
        differences[node.name] = d
        found.append(
            Origin(
                boundary=node.name,
                unit="",
                interval=_interval(nodes, names, node),
                sample=int(place.sample[row]),
                position=int(place.position[row]),
                elements=d.elements,
                differing=d.differing,
                max_abs=d.max_abs,
                max_ulp=d.max_ulp,
            )
        )
    return found, differences


def _interval(nodes: Sequence[Boundary], names: Sequence[str], node: Boundary) -> list[str]:
    """``node`` with the boundaries right before it at which nothing could be put in."""
    by_name = {n.name: n for n in nodes}
    found: set[str] = set()
    frontier = [*node.inputs]
    while frontier:
        name = frontier.pop()
        if name not in names and name not in found:
            found.add(name)
            frontier += by_name[name].inputs
    return [n.name for n in nodes if n.name in found] + [node.name]


def units_of(nodes: Sequence[Boundary], members: Mapping[str, Sequence[str]], found: Sequence[Origin]) -> list[Unit]:
    """The units with what was seen of them; each origin learns its unit's name."""
    operators = {n.name: n.operator for n in nodes}
    units = []
    for name, boundaries in members.items():
        mine = [o for o in found if o.boundary in boundaries]
        for origin in mine:
            origin.unit = name
        units.append(
            Unit(
                name=name,
                operator=operators[boundaries[0]],
                boundaries=list(boundaries),
                interval=max((o.interval for o in mine), key=len),
                elements=sum(o.elements for o in mine),
                differing=sum(o.differing for o in mine),
                max_abs=max(o.max_abs for o in mine),
                max_ulp=max(o.max_ulp for o in mine),
            )
        )
    return units
