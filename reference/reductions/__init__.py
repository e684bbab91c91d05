"""Orders of summation of a row, as pure functions; a contract names one and its parameters.

Every function takes float32 [..., n] and returns float32 [...]; `step="square"` accumulates squares by FMA.
"""

from collections.abc import Callable

from reference.checks import Float32Array
from reference.reductions.blocked import blocked
from reference.reductions.cascade import cascade
from reference.reductions.chain import chain
from reference.reductions.lanes_tree import lanes_tree
from reference.reductions.pairwise import pairwise
from reference.reductions.segments_tree import segments_tree
from reference.reductions.split_k import split_k
from reference.reductions.strided_vector import strided_vector
from reference.reductions.tree import binary_counter, halving_tree, merge_tree, pairs_tree
from reference.reductions.warp_shuffle import warp_shuffle

#: Every order by the name that a contract carries.
REDUCTIONS: dict[str, Callable[..., Float32Array]] = {
    "chain": chain,
    "cascade": cascade,
    "lanes-tree": lanes_tree,
    "segments-tree": segments_tree,
    "blocked": blocked,
    "warp-shuffle": warp_shuffle,
    "strided-vector": strided_vector,
    "split-k": split_k,
    "pairwise": pairwise,
}

__all__ = [
    "REDUCTIONS",
    "binary_counter",
    "blocked",
    "cascade",
    "chain",
    "halving_tree",
    "lanes_tree",
    "merge_tree",
    "pairs_tree",
    "pairwise",
    "segments_tree",
    "split_k",
    "strided_vector",
    "warp_shuffle",
]
