"""Draws out of counters: the distribution, what they depend on, and their bits on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from integration.vllm.draws import draw

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def logits(rows: int, columns: int) -> Any:
    """Values of every size, exact on any machine: no library's random numbers."""
    count = torch.arange(rows * columns).reshape(rows, columns)
    return ((count * 2654435761) % 4093).float() / 256 - 8


def test_draws_follow_the_softmax() -> None:
    row = logits(1, 40)
    row[0, [3, 17]] = -float("inf")
    count, p = 20_000, torch.softmax(row[0].double(), 0)
    many = row.expand(count, 40).contiguous()
    fixed, running = torch.full((count,), 7), torch.arange(count)
    both = [draw(many, running * 1000003, fixed), draw(many, fixed, running)]
    for drawn in both:
        found = torch.bincount(drawn, minlength=40).double()
        assert found[3] == found[17] == 0
        expected = (count * p)[p > 0]
        # 37 degrees of freedom: exceeded once in 100,000.
        assert float(((found[p > 0] - expected) ** 2 / expected).sum()) < 85
        # Neighbours are independent: equal as often as two draws are.
        same = float((drawn[1:] == drawn[:-1]).double().mean())
        assert abs(same - float((p * p).sum())) < 0.02


def test_a_draw_depends_on_its_own_row_seed_and_position_only() -> None:
    table = logits(12, 509)
    seeds, positions = torch.arange(12) * 997 + (1 << 60), torch.arange(12) + 30
    whole = draw(table, seeds, positions)
    for rows in (slice(0, 1), slice(5, 9), slice(11, 12)):
        assert torch.equal(draw(table[rows], seeds[rows], positions[rows]), whole[rows])
    assert not torch.equal(draw(table, seeds, positions + 1), whole)
    assert not torch.equal(draw(table, seeds + 1, positions), whole)
    # Logits that are shifted by a constant are the same distribution, and the same draw.
    assert torch.equal(draw(table + 64, seeds, positions), whole)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_draws_these_tokens(device: str) -> None:
    table = logits(6, 49152).to(device)
    drawn = draw(table, (torch.arange(6) * 12345678901).to(device), (torch.arange(6) + 100).to(device))
    assert drawn.tolist() == [42313, 9167, 21554, 18543, 20697, 23619]
