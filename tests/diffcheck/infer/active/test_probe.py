"""A kernel whose order is known is answered with it; what is no tree, or does not repeat itself, is said to be so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffcheck.base.errors import ExitCode, InputError
from diffcheck.infer import active as probing
from diffcheck.infer.active.arithmetic import Arithmetic, evaluate
from diffcheck.infer.active.kernel import Float64Array, Kernel
from diffcheck.infer.active.tree import OutsideError, Tree, describe, fold, reveal, to_text
from reference.arithmetic import fma
from tests.diffcheck.in_process import rlk


def leaves(tree: Tree) -> set[int]:
    return fold(tree, lambda leaf: {leaf}, lambda children: set().union(*children))


def under_of(tree: Tree) -> Callable[[int, int], int]:
    """What a kernel of this order would count."""

    def under(i: int, j: int) -> int:
        node = tree
        while not isinstance(node, int):
            inside = [child for child in node if {i, j} <= leaves(child)]
            if not inside:
                break
            node = inside[0]
        return len(leaves(node))

    return under


def random_tree(rng: np.random.Generator, n: int, most: int) -> Tree:
    """Of shuffled summands, nodes of up to ``most`` children, ordered as `reveal` orders them."""
    parts: list[Tree] = [int(i) for i in rng.permutation(n)]
    while len(parts) > 1:
        count = min(len(parts), int(rng.integers(2, most + 1)))
        start = int(rng.integers(0, len(parts) - count + 1))
        parts[start : start + count] = [tuple(sorted(parts[start : start + count], key=lambda part: min(leaves(part))))]
    return parts[0]


@pytest.mark.parametrize("most", [2, 5])
def test_any_tree_is_revealed(most: int) -> None:
    rng = np.random.default_rng(most)
    for n in (2, 3, 9, 24):
        tree = random_tree(rng, n, most)
        assert to_text(reveal(under_of(tree), n)) == to_text(tree)


def test_answers_of_no_tree_are_refused() -> None:
    with pytest.raises(OutsideError):
        reveal(lambda i, j: 3 if (i, j) == (0, 1) else 4, 4)


def test_deep_chains_need_no_recursion() -> None:
    n = 3000
    assert describe(reveal(lambda i, j: n - min(i, j), n)) == "chain of 3000, descending"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ((((0, 1), 2), 3), "chain of 4, ascending"),
        (((0, 4), 8), "chain of 3, 4 apart, ascending"),
        (((0, 1), (2, 3)), "balanced tree of 4"),
        (((0, 1, 2), 3, 4), "3 at once: [from 0: 3 at once: 3 summands (0 1 2)], 2 summands (3 4)"),
        ((((0, 2), (1, 3)), 4), "chain of [from 0: balanced tree of 4], summand 4"),
    ],
)
def test_words(tree: Tree, words: str) -> None:
    assert describe(tree) == words


def added(tree: Tree, arithmetic: str = "float32", products: str = "none", name: str = "ours") -> Kernel:
    """A kernel that adds in this order."""
    own = Arithmetic(arithmetic, products)

    def run(x: Float64Array, y: Float64Array | None) -> tuple[float, str]:
        rows = None if y is None else y[None]
        return float(evaluate(tree, x[None], rows, own, "float32")[0]), "float32"

    return Kernel(name, len(leaves(tree)), "float32", products != "none", run)


@pytest.mark.parametrize("sums", ["float32", "float64"])
def test_order_and_format_of_sums(sums: str) -> None:
    tree = random_tree(np.random.default_rng(3), 40, 2)
    answer = probing.probe(added(tree, sums))
    assert answer.tree is not None
    assert to_text(answer.tree) == to_text(tree)
    assert answer.arithmetic == [Arithmetic(sums, "none")]
    assert answer.exit_code is ExitCode.EQUAL


@pytest.mark.parametrize("products", ["fused", "rounded"])
def test_a_fused_product_is_told_from_a_rounded_one(products: str) -> None:
    answer = probing.probe(added(random_tree(np.random.default_rng(4), 24, 2), "float32", products))
    assert answer.arithmetic == [Arithmetic("float32", products)]


def test_fused_multiply_add_in_one_chain_by_hand() -> None:
    """Without this package's own evaluation of trees."""

    def run(x: Float64Array, y: Float64Array | None) -> tuple[float, str]:
        assert y is not None
        total = np.zeros(1, np.float32)
        for a, b in zip(x.astype(np.float32), y.astype(np.float32), strict=True):
            total = fma(a[None], b[None], total)
        return float(total[0]), "float32"

    answer = probing.probe(Kernel("chain", 30, "float32", True, run))
    assert answer.to_json()["order"] == "chain of 30, ascending"
    assert answer.arithmetic == [Arithmetic("float32", "fused")]


def test_a_compensated_sum_is_outside() -> None:
    def run(x: Float64Array, _: Float64Array | None) -> tuple[float, str]:
        total = lost = np.float32(0)
        for value in x.astype(np.float32):
            rest = np.float32(value - lost)
            after = np.float32(total + rest)
            lost = np.float32(np.float32(after - total) - rest)
            total = after
        return float(total), "float32"

    answer = probing.probe(Kernel("kahan", 16, "float32", False, run))
    assert answer.exit_code is ExitCode.INCONCLUSIVE
    assert answer.outside


def test_one_wrong_bit_in_the_random_sums_is_no_confirmation() -> None:
    honest = added((((0, 1), 2), 3))

    def run(x: Float64Array, y: Float64Array | None) -> tuple[float, str]:
        value, output = honest.run(x, y)
        if np.abs(x).max() != 1.0 and np.abs(x).max() < 2.0**50 and x[0] > 40:
            value = float(np.nextafter(np.float32(value), np.float32(np.inf)))
        return value, output

    answer = probing.probe(Kernel("flipped", 4, "float32", False, run))
    assert answer.tree is not None
    assert 0 < answer.trials[Arithmetic("float32", "none")] < answer.draws
    assert not answer.arithmetic


def test_a_kernel_that_does_not_repeat_itself() -> None:
    state = iter(range(10**6))
    answer = probing.probe(Kernel("noise", 4, "float32", False, lambda x, _: (float(x.sum()) + next(state), "float32")))
    assert answer.outside == "it does not repeat itself"


@pytest.mark.parametrize("name", ["sum", "sum-bfloat16", "index_add", "dot", "linear-bfloat16-1"])
def test_torch_on_this_machine(name: str) -> None:
    answer = probing.probe(probing.named(name, length=64))
    assert answer.exit_code is ExitCode.EQUAL, (answer.outside, answer.trials)


def test_two_rows_of_zeros_are_no_sum() -> None:
    with pytest.raises(InputError, match="does not add them"):
        probing.probe(Kernel("zero", 4, "float32", False, lambda x, _: (0.0, "float32")))


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    done = rlk("probe", "index_add", "torch:dot", "--as", "dot", "--length", "16")
    assert done.code == 2
    assert "--as dot would change nothing: index_add" in done.err
    done = rlk("probe", "index_add", "--length", "16", "--json", str(out))
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert found["answers"][0]["tree"].count("(") == 15
    assert "chain of 16, ascending" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nonsense",), "'nonsense' is none of"),
        (("torch:dot",), "--as"),
        (("nowhere:f", "--as", "sum"), "nowhere cannot be imported"),
        (("torch:nope", "--as", "sum"), "torch has no nope"),
        (("torch:logsumexp", "--as", "sum"), "raised TypeError"),
        (("math:fsum", "--as", "sum"), "its output is float"),
        (("linear", "--element", "3"), "--element '3'"),
        (("linear", "--element", "99,0"), "outside of an output"),
        (("sum", "--dtype", "int8"), "dtype 'int8'"),
        (("sum", "--device", "tpu"), "--device 'tpu'"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], message: str) -> None:
    done = rlk("probe", *words)
    assert (done.code, message in done.err) == (2, True), done.err


def test_committed_answers_are_of_this_catalogue() -> None:
    path = Path(__file__).parents[4] / "diffcheck" / "results" / "probe-cpu.json"
    found: dict[str, Any] = json.loads(path.read_text())
    assert [answer["kernel"] for answer in found["answers"]] == list(probing.KERNELS)
