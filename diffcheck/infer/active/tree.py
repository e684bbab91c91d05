"""The order of a sum as a tree, found from outside by the numbers that swamp others.

Two summands are M and -M, all others 1, with M so large that a 1 that meets it is lost. They cancel where they meet, so
the result counts the summands that join later: n minus the leaves under the lowest node above both. From these counts
the tree follows, as FPRev showed (Xie et al., "FPRev: Revealing the Order of Floating-Point Summation", USENIX ATC
2025); a node of more than two children is one that adds several at once, as matrix units do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")

#: A leaf is the index of a summand; a node its children, ordered by their least leaf.
Tree: TypeAlias = "int | tuple[Tree, ...]"
#: Leaves under the lowest node above summands i and j.
Under = Callable[[int, int], int]


class OutsideError(ValueError):
    """What was counted belongs to no tree of additions."""


def reveal(under: Under, n: int) -> Tree:
    """The tree of ``n`` summands.

    Args:
        under: answers in 2..n. It is asked between n - 1 times (one chain) and n (n - 1) / 2 times.

    Raises:
        OutsideError: the answers fit no tree: a compensated sum, an order that depends on the values, ...
    """
    # without recursion: a chain is as deep as it is long
    stack: list[_Builder] = [_build(under, range(n))]
    found: Tree | None = None
    while stack:
        try:
            wanted = stack[-1].send(found)
        except StopIteration as done:
            stack.pop()
            found = done.value
        else:
            stack.append(_build(under, wanted))
            found = None
    assert found is not None
    return found


#: Asks for the trees of some of its members, and returns its own.
_Builder: TypeAlias = "Generator[Sequence[int], Tree | None, Tree]"


def _build(under: Under, members: Sequence[int]) -> _Builder:
    first, *others = members
    levels: dict[int, list[int]] = {}
    for other in others:
        levels.setdefault(under(first, other), []).append(other)
    node: Tree = first
    leaves = 1
    for size in sorted(levels):
        leaves += len(levels[size])
        if size != leaves:
            raise OutsideError(f"{leaves} summands lie under a node of {size}")
        children = [node]
        for group in _siblings(under, levels[size], size):
            child = yield group
            assert child is not None
            children.append(child)
        node = _join(*children)
    return node


def _siblings(under: Under, members: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """The leaves of every child of a node of ``size`` leaves that holds ``members``: one, or several added at once."""
    waiting = list(members)
    while waiting:
        first, *others = waiting
        sizes = {other: under(first, other) for other in others}
        if any(found > size for found in sizes.values()):
            raise OutsideError(f"summand {first} meets one of its node of {size} above it")
        yield [first, *(other for other in others if sizes[other] < size)]
        waiting = [other for other in others if sizes[other] == size]


def _join(*children: Tree) -> Tree:
    return tuple(sorted(children, key=least))


def least(tree: Tree) -> int:
    """The least leaf."""
    while not isinstance(tree, int):
        tree = tree[0]
    return tree


def is_binary(tree: Tree) -> bool:
    """Whether every node adds two."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, int):
            if len(node) != 2:
                return False
            waiting += node
    return True


@dataclass(frozen=True)
class _Shape:
    """What a subtree looks like wherever it starts."""

    kind: Literal["leaf", "chain", "falling", "tree", "fused", "other"]
    #: In words; nothing for a leaf.
    text: str
    #: The subtree with its least leaf at 0, as text.
    key: str
    first: int
    #: What a chain, or any other row of additions, adds, in this order; what a balanced tree is made of.
    items: tuple[_Shape, ...] = ()
    #: Between the first leaves of neighbouring items.
    step: int = 0
    #: The two subtrees of a balanced tree: what looks like one may be the beginning of a chain.
    halves: tuple[_Shape, ...] = ()


def describe(tree: Tree) -> str:
    """The tree in words: chains, balanced trees of equal parts, and where they begin to differ."""
    return fold(tree, lambda leaf: _Shape("leaf", "", "0", leaf), _shape).text or "one summand"


def fold(tree: Tree, of_leaf: Callable[[int], T], of_node: Callable[[list[T]], T]) -> T:
    """``of_node`` of what the children gave, from the leaves up."""
    waiting: list[tuple[Tree, bool]] = [(tree, False)]
    done: list[T] = []
    while waiting:
        node, ready = waiting.pop()
        if isinstance(node, int):
            done.append(of_leaf(node))
        elif ready:
            children = done[-len(node) :]
            del done[-len(node) :]
            done.append(of_node(children))
        else:
            waiting.append((node, True))
            waiting += [(child, False) for child in reversed(node)]
    return done[0]


def _shape(parts: list[_Shape]) -> _Shape:
    first = parts[0].first
    key = "(" + " ".join(f"{part.key}+{part.first - first}" for part in parts) + ")"
    if len(parts) > 2:
        return _Shape("fused", f"{len(parts)} at once: {_row(parts)}", key, first, tuple(parts))
    a, b = parts
    step = b.first - a.first
    if a.kind == "chain" and b.key == a.items[0].key and b.first - a.items[-1].first == a.step:
        return _chain(key, (*a.items, b), a.step)
    if a.kind == "tree" and b.key == a.halves[0].key and b.first - a.halves[1].first == a.step:
        return _chain(key, (*a.halves, b), a.step)
    falls = b.kind == "falling" or (b.kind == "chain" and len(b.items) == 2)
    if falls and a.key == b.items[0].key and step == b.step:
        items = b.items if b.kind == "falling" else b.items[::-1]
        return _chain(key, (*items, a), step, falling=True)
    if a.key == b.key:
        if a.kind == "tree" or (a.kind == "chain" and len(a.items) == 2):
            items = (*a.items, *b.items)
            return _Shape("tree", f"balanced tree of {len(items)}{_each(items)}", key, first, items, step, (a, b))
        return _chain(key, (a, b), step)
    long, short = (a, b) if len(_row_of(a)) >= len(_row_of(b)) else (b, a)
    items = (*_row_of(long), short)
    return _Shape("other", f"chain of {_row(items)}", key, first, items)


def _chain(key: str, items: tuple[_Shape, ...], step: int, falling: bool = False) -> _Shape:
    apart = "" if step == 1 else f", {step} apart"
    text = f"chain of {len(items)}{apart}, {'descending' if falling else 'ascending'}{_each(items)}"
    return _Shape("falling" if falling else "chain", text, key, min(item.first for item in items), items, step)


def _each(items: Sequence[_Shape]) -> str:
    return f", each a {items[0].text}" if items[0].text else ""


def _row_of(part: _Shape) -> tuple[_Shape, ...]:
    return part.items if part.kind in ("chain", "falling", "other") else (part,)


def _row(items: Sequence[_Shape]) -> str:
    """Items in the order of their addition; neighbouring summands are listed, the first of them, and counted."""
    words: list[str] = []
    leaves: list[int] = []
    for item in (*items, None):
        if item is not None and item.kind == "leaf":
            leaves.append(item.first)
            continue
        if leaves:
            shown = " ".join(map(str, leaves[:_SHOWN])) + (" ..." if len(leaves) > _SHOWN else "")
            words.append(f"{len(leaves)} summands ({shown})" if len(leaves) > 1 else f"summand {leaves[0]}")
            leaves = []
        if item is not None:
            words.append(f"[from {item.first}: {item.text}]")
    rest = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


#: Items of a row that are written out.
_SHOWN = 8


def to_text(tree: Tree) -> str:
    """The tree as nested parentheses: ``((0 1) (2 3))``."""
    return fold(tree, str, lambda children: f"({' '.join(children)})")
