"""A forward in which some operators are one side's and all others the other's, and the proof that it is one.

The foreign operators must run on the inputs that this very forward has, which nobody recorded. A contract that gives
all traced bits of a foreign operator lets the reference stand for it. Where none is known, the engines take turns: the
values put in are replaced by what the foreign engine gives on the forward's present inputs, until nothing changes any
more; each turn settles one more level of the dataflow. Either way the foreign engine has the last word: in lockstep on
the finished forward it must give the bits that were put in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffcheck.ablate.recompute import Operator, Recompute
from diffcheck.ablate.result import Evidence, Removed, Trial
from diffcheck.ablate.sides import Run, Side, logprob_stats, same
from diffcheck.base.boundaries import Boundary
from diffcheck.base.statistics import LogprobStats
from diffcheck.trace.reader import Trace

#: Turns of the engines after which a forward is given up as unproven.
TURNS = 8


@dataclass
class Bench:
    """Both sides of one model, and what is known of their operators.

    The donor's operators are put into the host; ``target`` are the donor's logprobs.
    """

    host: Side
    donor: Side
    nodes: Sequence[Boundary]
    #: Boundaries at which values can be put in, in dataflow order.
    names: Sequence[str]
    #: Folder of the model, for the weights of recomputed operators.
    model: Path
    #: Boundaries at which the host's operator gives other bits than the donor's on equal inputs, in dataflow order.
    differing: list[str] = field(default_factory=list)
    #: Role of a side -> boundary -> what gives all bits of that side's operator there.
    operators: dict[str, dict[str, Operator]] = field(default_factory=dict)

    @property
    def baseline(self) -> LogprobStats:
        return self.against_donor(self.host.trace)

    def against_donor(self, trace: Trace) -> LogprobStats:
        """Logprobs of ``trace`` and the donor, the rollout side as left."""
        pair = (self.donor.trace, trace) if self.donor.role == "rollout" else (trace, self.donor.trace)
        return logprob_stats(*pair)

    def known(self, side: Side, names: Sequence[str]) -> dict[str, Operator]:
        """Operators of ``side`` at those of ``names`` where one is known."""
        operators = self.operators.get(side.role, {})
        return {name: operators[name] for name in names if name in operators}

    def unknown(self, side: Side, names: Sequence[str]) -> set[int | None]:
        """Layers of those of ``names`` at which ``side``'s operator is not known: about as many turns settle them."""
        operators = self.operators.get(side.role, {})
        return {node.layer for node in self.nodes if node.name in names and node.name not in operators}


def align(bench: Bench, units: Mapping[str, Sequence[str]], aligned: Sequence[str]) -> Trial | None:
    """The forward in which the units named ``aligned`` are the donor's and the rest is the host's; None where it would
    take more turns of the engines than are allowed.

    Of the two ways to make it, the one with fewer operators to be found out by turns: the host with ``aligned`` put in,
    or the donor with all other units put in.

    Args:
        units: name -> boundaries, of all units.

    Raises:
        VoidError: a substitution did not take place.
    """
    put_in = [b for name in aligned for b in units[name]]
    rest = [b for name in units if name not in aligned for b in units[name]]
    ways = [(bench.host, bench.donor, put_in), (bench.donor, bench.host, rest)]
    changed, other, foreign = min(
        (way for way in ways if way[0].live),
        # A foreign operator without a contract costs turns; with the foreign engine away it cannot be proven at all.
        key=lambda way: (len(bench.unknown(way[1], way[2])), len(way[2])),
    )
    if other.live and len(bench.unknown(other, foreign)) >= TURNS:
        return None
    before = bench.host.runs + bench.donor.runs
    made = compose(bench, changed, other, _ordered(bench, foreign))
    runs = bench.host.runs + bench.donor.runs - before
    removed = Removed.of(bench.baseline, made.logprobs)
    return Trial(
        list(aligned), made.logprobs, removed, made.evidence, changed.name, runs, made.note, elsewhere=made.elsewhere
    )


def left_out_at(bench: Bench, units: Mapping[str, Sequence[str]], boundary: str) -> Trial:
    """The donor's forward with the host's operator at one boundary: all units aligned, but for this place of one.

    Its inputs are the donor's own, so two turns settle it at any depth.

    Raises:
        VoidError: a substitution did not take place.
    """
    before = bench.host.runs + bench.donor.runs
    made = compose(bench, bench.donor, bench.host, [boundary])
    runs = bench.host.runs + bench.donor.runs - before
    removed = Removed.of(bench.baseline, made.logprobs)
    aligned = [name for name, members in units.items() if boundary not in members]
    return Trial(
        aligned,
        made.logprobs,
        removed,
        made.evidence,
        bench.donor.name,
        runs,
        made.note,
        place=boundary,
        elsewhere=made.elsewhere,
    )


def _ordered(bench: Bench, names: Sequence[str]) -> list[str]:
    chosen = set(names)
    return [node.name for node in bench.nodes if node.name in chosen]


@dataclass(frozen=True)
class Composite:
    """What a composed forward gave."""

    #: Against the donor's.
    logprobs: LogprobStats
    evidence: Evidence
    #: Why it is unproven.
    note: str = ""
    #: Boundaries that are no origins, at which the sides nevertheless differ on these inputs.
    elsewhere: list[str] = field(default_factory=list)


def compose(bench: Bench, changed: Side, other: Side, foreign: Sequence[str]) -> Composite:
    """``changed``'s forward with ``other``'s operators at ``foreign`` (in dataflow order).

    Raises:
        VoidError: a substitution did not take place.
    """
    operators = bench.known(other, foreign)
    values, wrong, elsewhere = other.trace, list(foreign), list[str]()
    judged: Run | None = None
    for _ in range(TURNS):
        recomputed = [Recompute(name, o, other.trace.folder, bench.model) for name, o in operators.items()]
        run = changed.spliced(values, [name for name in foreign if name not in operators], recomputed)
        stats = bench.against_donor(run.trace)
        if judged is not None:
            judged.discard()
        if not other.live:
            evidence, note = _without_engine(bench, other, run.trace, foreign, operators)
            run.discard()
            return Composite(stats, evidence, note)
        judged = other.lockstep(run.trace, bench.names)
        values = judged.given
        differing = [name for name in bench.names if not same(values, run.trace, name)]
        run.discard()
        wrong = [name for name in foreign if name in differing]
        elsewhere = [name for name in differing if name not in foreign and name not in bench.differing]
        if not wrong:
            break
        # The engine has refuted these; from here on it answers itself.
        operators = {name: operator for name, operator in operators.items() if name not in wrong}
    if judged is not None:
        judged.discard()
    if wrong:
        settled = f"{wrong[0]} was not settled after {TURNS} turns of the two engines"
        return Composite(stats, "unproven", f"{settled} ({len(wrong)} boundaries in all)")
    return Composite(stats, "engine", "", elsewhere)


def _without_engine(
    bench: Bench, other: Side, after: Trace, foreign: Sequence[str], operators: Mapping[str, Operator]
) -> tuple[Evidence, str]:
    """How far a forward can be believed whose foreign engine is not live."""
    nodes = {node.name: node for node in bench.nodes}
    moved = []
    for name in foreign:
        node = nodes[name]
        sources = [s for s in (*node.inputs, *node.fused_inputs) if s in bench.names]
        if not all(same(after, other.trace, s) for s in sources):
            moved.append(name)
    if not moved:
        return "inputs", ""
    open_ = [name for name in moved if name not in operators]
    if open_:
        return (
            "unproven",
            f"{open_[0]} has other inputs than were traced, and {other.name} is not live to say its outputs",
        )
    return "contract", ""
