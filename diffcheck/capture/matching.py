"""Whether what a plan would change is there to be changed: said before an engine starts where that can be known."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from diffcheck.base.boundaries import Boundary
from diffcheck.base.errors import InputError
from diffcheck.capture.interventions import BitFlip, Intervention
from diffcheck.capture.plan import CapturePlan
from reference.contract.names import nearest

#: Bits of the widest dtype that a boundary has.
_BITS = 32


def check_layers(layers: tuple[int, int] | None, count: int) -> None:
    """Check a range of layers against a model of ``count``.

    Raises:
        InputError: the range reaches past the last layer: what it names there would not be observed.
    """
    if layers is not None and layers[1] > count:
        raise InputError(
            f"--layers {layers[0]}:{layers[1]}: the model has {count} layers, 0 to {count - 1}",
            f"choose a range within 0:{count}",
        )


def check_matches(plan: CapturePlan, boundaries: Sequence[Boundary]) -> None:
    """Check that every layer, boundary, sample, position, element and bit that ``plan`` names is one of the model's and
    of its samples. Responses that are still to be written count with the length that is asked for.

    Raises:
        InputError: one is not; it is named, with the nearest name or the range.
    """
    layers = {node.layer for node in boundaries if node.layer is not None}
    check_layers(plan.layers, len(layers))
    for intervention in plan.interventions:
        matching = [node for node in boundaries if fnmatchcase(node.name, intervention.boundary)]
        if not matching:
            names = [node.name for node in boundaries]
            raise InputError(
                f"{words(intervention)}: no boundary of the model matches {intervention.boundary!r}",
                f"nearest: {', '.join(nearest(intervention.boundary, names))}; layers are 0 to {len(layers) - 1}",
            )
        if isinstance(intervention, BitFlip):
            _check_flip(intervention, plan, matching)


def _check_flip(flip: BitFlip, plan: CapturePlan, matching: Sequence[Boundary]) -> None:
    count = len(plan.samples)
    _in_range(flip, "sample", flip.sample, 0, count)
    sample = plan.samples[flip.sample]
    last = len(sample.token_ids) + (0 if sample.response_token_ids else plan.generate) - 1
    first = 0 if any(node.rows == "all" for node in matching) else len(sample.prompt_token_ids) - 1
    _in_range(flip, "position", flip.position, first, last)
    _in_range(flip, "element", flip.index, 0, min(node.width for node in matching))
    _in_range(flip, "bit", flip.bit, 0, _BITS)


def _in_range(flip: BitFlip, what: str, value: int, first: int, stop: int) -> None:
    if not first <= value < stop:
        raise InputError(f"{words(flip)}: {what} {value} is not there", f"choose from {first} to {stop - 1}")


def words(intervention: Intervention) -> str:
    """An intervention as its user wrote it, for messages and for the list of what was changed."""
    if isinstance(intervention, BitFlip):
        at = ",".join(str(n) for n in (intervention.sample, intervention.position, intervention.index))
        return f"{intervention.boundary}: flip={at},{intervention.bit}"
    return f"intervention at {intervention.boundary}: {type(intervention).__name__}"
