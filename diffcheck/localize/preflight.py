"""Preflight: did the two sides compute the same object? Checked field by field before any float is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diffcheck.base.record import ObjectRecord
from diffcheck.base.samples import Sample
from diffcheck.live_model.facts import fold

#: Mismatches listed one by one; a wholly different checkpoint needs no more to be told.
MAX_LISTED = 20


@dataclass(frozen=True)
class Mismatch:
    """One field in which the objects differ, as each side has it."""

    field: str
    left: Any
    right: Any


def compare_objects(left: ObjectRecord, right: ObjectRecord) -> list[Mismatch]:
    """All fields in which two object records differ, most telling first, at most `MAX_LISTED`.

    Physical choices that cannot change the object are not compared as such but checked on each side for being faithful:
    block tables, cache layout, padded vocabulary, shard maps.
    """
    found: list[Mismatch] = []
    # What one side cannot know is no difference.
    left, right = _completed(left, right), _completed(right, left)
    for mismatch in _walk(left, right):
        found.append(mismatch)
        if len(found) == MAX_LISTED:
            break
    return found


def _completed(record: ObjectRecord, other: ObjectRecord) -> ObjectRecord:
    return replace(record, **{name: getattr(other, name) for name in record.unknown})


def compare_versions(
    left: ObjectRecord, right: ObjectRecord, left_samples: Sequence[Sample], right_samples: Sequence[Sample]
) -> list[Mismatch]:
    """Contradictions between the versions of the weights that samples were written under and those that computed.

    Args:
        left_samples, right_samples: as many, in one order.
    """
    found: list[Mismatch] = []
    for role, record, samples in (("rollout", left, left_samples), ("train", right, right_samples)):
        versions: dict[int, list[int]] = {}
        for i, sample in enumerate(samples):
            if sample.weight_version is not None:
                versions.setdefault(sample.weight_version, []).append(i)
        if len(versions) > 1 and not any(m.field == "weight_version of the samples" for m in found):
            listed = "; ".join(f"version {v}: samples {_few(at)}" for v, at in sorted(versions.items()))
            found.append(Mismatch("weight_version of the samples", listed, "one set of weights computes them all"))
        if record.weight_version is not None:
            for version, at in sorted(versions.items()):
                if version != record.weight_version:
                    here = f"{record.weight_version} in the {role} engine"
                    found.append(Mismatch(f"weight_version[sample {at[0]}]", f"{version} in the sample", here))
                    break
    for i, (a, b) in enumerate(zip(left_samples, right_samples, strict=True)):
        if None not in (a.weight_version, b.weight_version) and a.weight_version != b.weight_version:
            found.append(Mismatch(f"weight_version[sample {i}]", a.weight_version, b.weight_version))
            break
    return found


def _few(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more


def _walk(a: ObjectRecord, b: ObjectRecord) -> Iterator[Mismatch]:
    if len(a.token_ids) != len(b.token_ids):
        yield Mismatch("samples", len(a.token_ids), len(b.token_ids))
        return
    yield from _mapping("model", a.model, b.model)
    if a.real_vocab != b.real_vocab:
        yield Mismatch("real_vocab", a.real_vocab, b.real_vocab)
    yield from _mapping("weights", a.weights, b.weights)
    if None not in (a.weight_version, b.weight_version) and a.weight_version != b.weight_version:
        yield Mismatch("weight_version", a.weight_version, b.weight_version)
    yield from _nested("token_ids", a.token_ids, b.token_ids)
    yield from _nested("target_ids", a.target_ids, b.target_ids)
    yield from _nested("positions", a.positions, b.positions)
    yield from _nested("active", a.active, b.active)
    if a.attention_mask != b.attention_mask:
        yield Mismatch("attention_mask", a.attention_mask, b.attention_mask)
    yield from _rope(a, b)
    yield from _layers(a, b)
    lengths = [len(ids) for ids in a.token_ids]
    for i, (x, y) in enumerate(zip(a.kv.logical(lengths), b.kv.logical(lengths), strict=True)):
        if x != y:
            yield Mismatch(f"kv[sample {i}]", x, y)
    for name in ("temperature", "top_p", "top_k"):
        if getattr(a, name) != getattr(b, name):
            yield Mismatch(name, getattr(a, name), getattr(b, name))
    # A side that scores given tokens draws nothing, so a random state matters only where both drew.
    if a.random_state is not None and b.random_state is not None:
        yield from _mapping("random_state", a.random_state, b.random_state)
    yield from _shards(a, b)


def _mapping(field: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Mismatch]:
    absent = "(absent)"
    for key in dict.fromkeys((*a, *b)):
        x, y = a.get(key, absent), b.get(key, absent)
        if x != y:
            yield Mismatch(f"{field}.{key}", x, y)


def _rope(a: ObjectRecord, b: ObjectRecord) -> Iterator[Mismatch]:
    """Parameters of RoPE that both sides' tables confirm. A table that no parameters give is no other object but
    another computation: it is found where it is read.
    """
    for key in a.rope:
        if key in b.rope and a.rope[key] != b.rope[key]:
            yield Mismatch(f"rope.{key}", a.rope[key], b.rope[key])


#: Facts of live modules that are part of the object. The softmax's scale is found where it is applied, since engines
#: also fold it elsewhere; formats are what is compared.
_OBJECT_FACTS = ("epsilon", "bias", "heads", "kv_scale", "soft_cap", "sinks")


def _layers(a: ObjectRecord, b: ObjectRecord) -> Iterator[Mismatch]:
    for field in _OBJECT_FACTS:
        x, y = a.layers.get(field, {}), b.layers.get(field, {})
        both = [name for name in x if name in y]
        if any(x[name] != y[name] for name in both):
            yield Mismatch(field, fold({n: x[n] for n in both}), fold({n: y[n] for n in both}))


def _nested(field: str, a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> Iterator[Mismatch]:
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if len(x) != len(y):
            yield Mismatch(f"{field}[sample {i}] length", len(x), len(y))
            continue
        for j, (u, v) in enumerate(zip(x, y, strict=True)):
            if u != v:
                yield Mismatch(f"{field}[sample {i}][{j}]", u, v)
                break


def _shards(a: ObjectRecord, b: ObjectRecord) -> Iterator[Mismatch]:
    """Each side's shards must tile their dimension: a gap or an overlap means that a value was built from the wrong
    ranks.
    """
    left, right = _untiled(a), _untiled(b)
    for name in dict.fromkeys((*left, *right)):
        yield Mismatch(f"shards.{name}", left.get(name, "tiles"), right.get(name, "tiles"))


def _untiled(record: ObjectRecord) -> dict[str, str]:
    broken = {}
    for name, ranges in record.shards.items():
        end = 0
        for start, stop in ranges:
            if start != end:
                broken[name] = f"a shard starts at {start}, expected {end}"
            end = stop
    return broken
