"""Which kernel a product launches: bulk copies only where they can fetch the operands and compute the unit."""

from __future__ import annotations

import pytest
import torch

from fastpath.backend import TARGETS, UnsupportedError, plan
from fastpath.machine_code.catalogue import contract, empty
from fastpath.products.linear import linear
from fastpath.products.matmul import product
from fastpath.products.row_linear import row_linear
from fastpath.products.schedules import Schedule, candidates, power_of_two, schedule

BULK = Schedule(128, 128, 64, warps=8, persistent=True)


def kernels(
    arch: str, operator: str, unit: str, x: torch.Tensor, w: torch.Tensor, chosen: Schedule | None
) -> list[str]:
    function = {"linear": linear, "row_linear": row_linear}[operator]
    name = str(x.dtype).removeprefix("torch.")
    with plan(arch) as launches:
        function(x, w, contract(operator, name, unit), plan=chosen)
    return [launch.kernel.fn.__name__ for launch in launches]


def test_bulk_copies_on_hopper() -> None:
    x, w = empty(256, 1024), empty(512, 1024)
    assert kernels("sm_90", "linear", "hopper-k16", x, w, BULK) == ["chain_kernel"]
    assert kernels("sm_90", "row_linear", "hopper-k16", x, w, BULK) == ["chain_kernel", "merge_kernel"]


@pytest.mark.parametrize(
    ("arch", "operator", "unit", "inputs", "dtype"),
    [
        ("sm_90", "linear", "fma32-seq", 1024, torch.bfloat16),  # the matrix unit would give other bits
        ("sm_90", "linear", "fma32-seq", 1024, torch.float32),
        ("sm_90", "linear", "hopper-k16", 1028, torch.bfloat16),  # rows of 2056 bytes
        ("sm_90", "row_linear", "hopper-k16", 768, torch.bfloat16),  # a step of 64 would leave a segment of 96
        ("gfx942", "linear", "mfma-cdna3-g8", 1024, torch.bfloat16),
    ],
)
def test_no_bulk_copies_elsewhere(arch: str, operator: str, unit: str, inputs: int, dtype: torch.dtype) -> None:
    x, w = empty(256, inputs, dtype=dtype), empty(512, inputs, dtype=dtype)
    assert kernels(arch, operator, unit, x, w, BULK)[0] == "tile_kernel"


def test_a_transposed_weight_is_fetched_by_pointers() -> None:
    own = contract("linear", "bfloat16", "hopper-k16")
    with plan("sm_90") as launches:
        product(empty(256, 1024), empty(1024, 512).t(), own, 1, torch.bfloat16, plan=BULK)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["tile_kernel"]


def test_units_of_another_vendor_are_refused() -> None:
    x, w = empty(8, 64), empty(16, 64)
    for arch, unit in (("sm_90", "mfma-cdna3-g8"), ("gfx942", "hopper-k16")):
        with pytest.raises(UnsupportedError, match=f"{unit} cannot run on {arch}"):
            kernels(arch, "linear", unit, x, w, None)


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 65, 512, 513, 8192])
@pytest.mark.parametrize("segments", [1, 8])
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_schedules_are_possible(arch: str, segments: int, tokens: int) -> None:
    target = TARGETS[arch]
    for unit in target.units:
        for outputs in (64, 1024, 4096, 24576, 151936):
            chosen = schedule(target, unit, tokens, outputs, 4096 // segments, segments)
            for one in (chosen, *candidates(target, unit, tokens, segments)):
                sizes = (one.tokens, one.outputs, one.k, one.local)
                assert all(size == power_of_two(size) for size in sizes)
                assert one.local <= segments
                assert not (one.persistent and arch != "sm_90")
