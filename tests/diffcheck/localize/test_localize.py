"""The dataflow logic of localize on synthetic traces: origins, receivers, intervals, coverage, what is never equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diffcheck.base.errors import ExitCode
from diffcheck.localize import localize
from diffcheck.localize.verdict import Verdict
from diffcheck.trace.reader import Trace
from diffcheck.trace.roles import side_names
from tests.diffcheck.synthetic import GRAPH, ROWS, Values, flip, header, pair, values, without, write


def status(verdict: Verdict, name: str) -> str:
    return next(r.status for r in verdict.boundaries if r.name == name)


def test_equal_traces_are_equal_with_full_coverage(tmp_path: Path) -> None:
    verdict = localize(*pair(tmp_path, lambda _: None))
    assert verdict.exit_code is ExitCode.EQUAL
    assert verdict.coverage.observed == verdict.coverage.expected == len(GRAPH)
    assert verdict.logprobs is not None and verdict.logprobs.compared == len(ROWS["response"])


@pytest.mark.parametrize("level", ["full", "sampled", "digest"])
@pytest.mark.parametrize("name", [b.name for b in GRAPH if b.name != "logprobs"])
def test_one_flipped_bit_is_named_exactly(tmp_path: Path, name: str, level: str) -> None:
    """Only this boundary differs, so it is the origin wherever it stands, and everything else is equal."""
    node = next(b for b in GRAPH if b.name == name)
    # An even row: at level sampled its pattern is stored.
    row, index = 2, node.width - 1
    left, right = pair(tmp_path, flip(name, row, index), level)
    verdict = localize(left, right)
    first = verdict.first_divergence
    assert verdict.exit_code is ExitCode.DIVERGED
    assert first is not None and first.boundary == name and first.role == "origin"
    rows = ROWS[node.rows]
    assert (first.sample, first.position) == (rows.sample[row], rows.position[row])
    assert [r.name for r in verdict.boundaries if r.status != "equal"] == [name]
    assert first.equal_before == [b.name for b in GRAPH].index(name)
    report = next(r for r in verdict.boundaries if r.name == name)
    stored = (len(rows) + 1) // 2 if level == "sampled" else len(rows)
    assert report.elements == stored * node.width, "what was compared is counted"
    if level == "digest":
        assert first.index is None and first.differing is None
        # A row differs, in nobody knows how many elements: not in none.
        assert report.differing is report.max_abs is report.max_ulp is None
    else:
        assert (first.index, first.differing, first.max_ulp) == (index, 1, 1)


def test_a_difference_that_only_digests_saw_has_no_statistics(tmp_path: Path) -> None:
    """Rows of odd number are not stored at level sampled: those that are would say that nothing differs."""
    verdict = localize(*pair(tmp_path, flip("layers.0.mlp.act", 3), "sampled"))
    report = next(r for r in verdict.boundaries if r.name == "layers.0.mlp.act")
    assert (report.status, report.rows_differing) == ("origin", 1)
    assert report.differing is report.max_abs is report.max_ulp is None
    equal = next(r for r in verdict.boundaries if r.name == "layers.0.mlp.up_proj")
    assert (equal.status, equal.differing, equal.max_abs, equal.max_ulp) == ("equal", 0, 0.0, 0)


def test_what_follows_is_a_receiver(tmp_path: Path) -> None:
    def change(v: Values) -> None:
        flip("layers.0.mlp.act", 1)(v)
        flip("layers.0.mlp.down_proj", 1, 3)(v)

    verdict = localize(*pair(tmp_path, change))
    assert verdict.first_divergence is not None and verdict.first_divergence.boundary == "layers.0.mlp.act"
    assert status(verdict, "layers.0.mlp.down_proj") == "receiver"


def test_a_second_fault_in_a_clean_row_is_an_origin_too(tmp_path: Path) -> None:
    """Row 1 of down_proj is explained by row 1 of act; row 3 is not."""

    def change(v: Values) -> None:
        for name, row in (("layers.0.mlp.act", 1), ("layers.0.mlp.down_proj", 1), ("layers.0.mlp.down_proj", 3)):
            flip(name, row)(v)

    verdict = localize(*pair(tmp_path, change))
    result = next(r for r in verdict.boundaries if r.name == "layers.0.mlp.down_proj")
    assert (result.status, result.rows_differing, result.rows_origin) == ("origin", 2, 1)


def test_attention_reads_earlier_positions_of_its_own_sample_only(tmp_path: Path) -> None:
    """Sample 0 holds rows 0..3, sample 1 rows 4..6. A key of row 1 explains row 3, neither row 0 nor row 5."""
    attention, cache = "layers.1.self_attn.attention", "layers.1.self_attn.k_cache"

    def change(v: Values) -> None:
        flip(cache, 1)(v)
        for row in (0, 3, 5):
            flip(attention, row)(v)

    verdict = localize(*pair(tmp_path, change))
    result = next(r for r in verdict.boundaries if r.name == attention)
    assert (result.rows_differing, result.rows_origin) == (3, 2)


def test_a_fused_norm_reads_the_terms_of_the_sum(tmp_path: Path) -> None:
    """Rounding may swallow a difference of down_proj in the residual; the next norm of a fusing engine still sees
    it.
    """

    def change(v: Values) -> None:
        flip("layers.0.mlp.down_proj", 1)(v)
        flip("layers.1.input_layernorm", 1)(v)

    verdict = localize(*pair(tmp_path, change))
    assert verdict.first_divergence is not None and verdict.first_divergence.boundary == "layers.0.mlp.down_proj"
    assert status(verdict, "layers.1.input_layernorm") == "receiver"


def test_an_unobserved_boundary_gives_an_interval_and_no_guess(tmp_path: Path) -> None:
    left, right = values(), values()
    flip("layers.0.mlp.down_proj", 0)(right)
    hidden = "layers.0.mlp.act"
    del right[hidden]
    a = write(tmp_path / "a", left, header("vllm"))
    b = write(tmp_path / "b", right, without(header("megatron"), hidden, "fused with the projection"))
    verdict = localize(a, b)
    first = verdict.first_divergence
    assert first is not None and first.role == "interval"
    assert first.interval == [hidden, "layers.0.mlp.down_proj"]
    assert "fused" in verdict.coverage.unobserved[hidden]
    assert hidden in verdict.summary


def test_an_unobserved_boundary_passes_differences_on(tmp_path: Path) -> None:
    """act is unobserved but gate_proj differs before it: down_proj is a receiver, not an interval's origin."""
    left, right = values(), values()
    flip("layers.0.mlp.gate_proj", 0)(right)
    flip("layers.0.mlp.down_proj", 0)(right)
    for side in (left, right):
        del side["layers.0.mlp.act"]
    verdict = localize(write(tmp_path / "a", left), write(tmp_path / "b", right))
    assert verdict.first_divergence is not None and verdict.first_divergence.boundary == "layers.0.mlp.gate_proj"
    assert verdict.first_divergence.role == "origin"
    assert status(verdict, "layers.0.mlp.down_proj") == "receiver"


def test_nothing_compared_is_inconclusive(tmp_path: Path) -> None:
    left, right = values(), {"norm": values()["norm"]}
    del left["norm"]
    verdict = localize(write(tmp_path / "a", left), write(tmp_path / "b", right))
    assert verdict.exit_code is ExitCode.INCONCLUSIVE and verdict.coverage.observed == 0


def test_equal_boundaries_without_logprobs_are_inconclusive(tmp_path: Path) -> None:
    left = values()
    del left["logprobs"]
    verdict = localize(write(tmp_path / "a", left), write(tmp_path / "b", dict(left)))
    assert verdict.exit_code is ExitCode.INCONCLUSIVE


def test_another_dtype_of_the_same_values_is_equal_and_of_others_is_not(tmp_path: Path) -> None:
    left, right = values(), values()
    wide = (right["logits"][0].astype(np.uint32) << 16, "float32")
    right["logits"] = wide
    assert localize(write(tmp_path / "a", left), write(tmp_path / "b", right)).exit_code is ExitCode.EQUAL
    hidden_by_a_cast = wide[0].copy()
    hidden_by_a_cast[0, 0] += 1
    right["logits"] = (hidden_by_a_cast, "float32")
    verdict = localize(Trace(tmp_path / "a"), write(tmp_path / "c", right))
    assert verdict.first_divergence is not None and verdict.first_divergence.boundary == "logits"
    assert verdict.first_divergence.dtypes == ("bfloat16", "float32")


def test_nan_payloads_are_one_class(tmp_path: Path) -> None:
    left, right = values(), values()
    left["norm"][0][0, 0], right["norm"][0][0, 0] = 0x7FC0, 0xFFC1
    assert localize(write(tmp_path / "a", left), write(tmp_path / "b", right)).exit_code is ExitCode.EQUAL
    right["norm"][0][0, 0] = 0x7F80
    verdict = localize(Trace(tmp_path / "a"), write(tmp_path / "c", right))
    assert verdict.first_divergence is not None and verdict.first_divergence.max_abs == float("inf")


def test_signed_zeros_differ(tmp_path: Path) -> None:
    left, right = values(), values()
    left["norm"][0][0, 0], right["norm"][0][0, 0] = 0x0000, 0x8000
    verdict = localize(write(tmp_path / "a", left), write(tmp_path / "b", right))
    assert verdict.first_divergence is not None and verdict.first_divergence.max_ulp == 0
    assert verdict.first_divergence.differing == 1


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (
            {"operators": {"linear": "vllm.model_executor.layers.quantization.fp8.Fp8LinearMethod"}},
            "weights in fp8 (Fp8LinearMethod)",
        ),
        ({"kv_cache_dtype": "fp8_e4m3"}, "KV cache in fp8_e4m3"),
    ],
)
def test_a_quantised_side_is_said_first(evidence: dict[str, object], words: str, tmp_path: Path) -> None:
    """What an engine says of its own operators, in a trace: first among the notes, and before the differing field."""
    plain = {"operators": {"linear": "vllm.model_executor.layers.linear.UnquantizedLinearMethod"}}
    left, right = header(), header("megatron")
    left.evidence, right.evidence = evidence, {**plain, "kv_cache_dtype": "auto"}
    right.object.weights = {**right.object.weights, "lm_head.weight": "cc"}
    verdict = localize(write(tmp_path / "left", values(), left), write(tmp_path / "right", values(), right))
    assert verdict.notes == [f"The rollout side is quantised: {words}."]
    assert verdict.verdict == "not_comparable" and verdict.summary.startswith(
        f"The rollout side is quantised ({words})."
    )


def test_two_sides_of_one_engine_are_named_by_role(tmp_path: Path) -> None:
    left, changed = write(tmp_path / "left", values()), values()
    flip("layers.0.mlp.act", 1)(changed)
    verdict = localize(left, write(tmp_path / "right", changed))
    assert verdict.summary.startswith("rollout vllm and train vllm computed the same object")
    missing = localize(left, write(tmp_path / "part", {"norm": values()["norm"]}))
    assert missing.coverage.unobserved["embed_tokens"] == "train (vllm): not captured"
    assert side_names("vllm", "megatron") == ("vllm", "megatron")
