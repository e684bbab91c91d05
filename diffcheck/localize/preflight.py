"""Preflight: did the two sides compute the same object? Checked field by field before any float is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diffcheck.base.record import ObjectRecord

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
    for mismatch in _walk(left, right):
        found.append(mismatch)
        if len(found) == MAX_LISTED:
            break
    return found


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
    yield from _mapping("rope", a.rope, b.rope)
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
