"""The page of a verdict: everything of it is there, escaped, and what the traces do not hold is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from diffcheck.ablate.result import Ablation, Origin, Pair, Removed, Trial, Unit
from diffcheck.base.errors import ExitCode
from diffcheck.base.statistics import LogprobStats
from diffcheck.capture.overrides import parse_override
from diffcheck.cli import main
from diffcheck.faults.laboratory import Laboratory
from diffcheck.infer import Inference, explain
from diffcheck.localize import localize
from diffcheck.localize.preflight import Mismatch
from diffcheck.localize.verdict import Verdict
from diffcheck.report.ablation import percent
from diffcheck.report.html import write_report
from diffcheck.trace.reader import Trace
from reference.contract import profile
from tests.diffcheck.report.browser import PHONE, needs_browser, scroll_width
from tests.diffcheck.synthetic import Values, flip, header, pair, values, without, write

LONG = ("a" * 20 + "1" * 44, "a" * 20 + "2" * 44)
EVIL = "<script>alert(1)</script>"


def page_of(folder: Path, left: Trace, right: Trace, change: Callable[[Verdict], object] = lambda _: None) -> str:
    verdict = localize(left, right)
    change(verdict)
    path = folder / "page.html"
    write_report(path, verdict, left, right)
    return path.read_text()


def words(page: str) -> str:
    """What a reader reads."""
    body = page[page.index("<body>") :]
    return " ".join(unescape(re.sub(r"<wbr>|<[^>]*>", lambda m: "" if "wbr" in m[0] else " ", body)).split())


def test_a_diverged_verdict_is_told_whole(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("layers.1.mlp.act", 2, 5))
    page = page_of(tmp_path, left, right)
    told = words(page)
    for part in (
        "first diverge at layers.1.mlp.act (sample 0, position 2).",
        "sample 0, position 2, element 5",
        "1 of 84 elements (1.19 %)",
        "44 of 44 boundaries were observed on both sides. Nothing was left unseen.",
        "0 of 5 logprobs differ",
        "How far apart",
        "How it spreads",
        "All 44 boundaries, one by one",
    ):
        assert part in told, part
    assert page.count('class="box origin"') == 2, "the graph, drawn for a desktop and for a phone"
    assert 'aria-label="1 of 1 ulp"' in page
    assert "http" not in page.replace("http-equiv", "")


def test_nothing_from_a_trace_is_trusted(tmp_path: Path) -> None:
    head = header(EVIL)
    head.versions = {EVIL: EVIL}
    head.changed = [EVIL]
    head.evidence = {EVIL: {EVIL: [EVIL]}}
    patterns = {k: v for k, v in values().items() if k != "norm"}
    left = write(tmp_path / "left", patterns, without(head, "norm", EVIL))
    _, right = pair(tmp_path / "other", flip("layers.0.mlp.act", 1))
    page = page_of(tmp_path, left, right)
    assert "<script" not in page and "&lt;script&gt;" in page


def test_objects_that_differ_get_a_table_and_no_graph(tmp_path: Path) -> None:
    head = header()
    head.object.temperature = 0.7
    head.object.token_ids[0][1] = 9
    page = page_of(tmp_path, write(tmp_path / "a", values()), write(tmp_path / "b", values(), head))
    told = words(page)
    assert "Fields in which the objects differ" in told and "temperature 1.0 0.7" in told
    assert "token_ids[sample 0][1] 4 9" in told and "No boundary was compared." in told
    assert "<svg" not in page and "First divergence" not in told


def test_equal_sides_have_no_figures_of_differences(tmp_path: Path) -> None:
    left, right = pair(tmp_path, lambda _: None)
    page = page_of(tmp_path, left, right)
    told = words(page)
    assert "agree in every bit of 44 boundaries and 5 logprobs" in told
    assert "First divergence" not in told and "How far apart" not in told and "How it spreads" not in told
    assert 'class="box origin"' not in page and 'class="box equal"' in page


def test_digests_tell_that_bits_differ_and_not_by_how_much(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("layers.1.attn_residual", 2), "digest")
    told = words(page_of(tmp_path, left, right))
    assert "No histogram of layers.1.attn_residual: the traces hold only its digests" in told
    assert "origin 1 row – – digests only" in told


def test_digests_of_a_layer_are_drawn_as_differing_by_an_unknown_amount(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("layers.0.mlp_residual", 2), "digest")
    page = page_of(tmp_path, left, right)
    assert "The traces hold digests only: a full cell differs, by how much is not known." in words(page)
    assert page.count('class="heat" fill-opacity="1"') == 2


def test_unobserved_boundaries_are_named_with_their_reason(tmp_path: Path) -> None:
    patterns = {k: v for k, v in values().items() if k != "layers.0.self_attn.q_norm"}
    reason = "the kernel keeps it in registers"
    left = write(tmp_path / "a", patterns, without(header(), "layers.0.self_attn.q_norm", reason))
    right_patterns: Values = values()
    flip("layers.0.self_attn.q_rope", 1)(right_patterns)
    right = write(tmp_path / "b", right_patterns)
    told = words(page_of(tmp_path, left, right))
    assert "arose in one of layers.0.self_attn.q_norm → layers.0.self_attn.q_rope" in told
    assert reason in told and "43 of 44 boundaries" in told and "not seen" in told


def test_infinite_and_missing_values_are_drawn(tmp_path: Path) -> None:
    def change(patterns: Values) -> None:
        patterns["logprobs"][0][:3, 0] = np.array([-np.inf, np.nan, 0], np.float32).view(np.uint32)
        patterns["norm"][0][0, 0] = 0x7FC0

    left, right = pair(tmp_path, change)
    page = page_of(tmp_path, left, right)
    assert "infinite or NaN, drawn at the top" in words(page) and "equal in every bit, drawn on the axis" in words(page)
    drawn = re.sub(r"<svg[^>]*>", "", page)
    assert not re.search(r'[a-z]="-?(nan|inf)"', drawn)


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Verdict, Trace, Trace]:
    """A real divergence of the reference, explained by inference."""
    lab = Laboratory(tmp_path_factory.mktemp("lab"))
    left, right = lab.run(()), lab.run((parse_override("layers.*.mlp.act: rounding.silu=bfloat16"),))
    verdict = localize(left, right)
    explain(verdict, left, right, lab.model, probe=False)
    return verdict, left, right


def test_the_two_contracts_stand_side_by_side(explained: tuple[Verdict, Trace, Trace], tmp_path: Path) -> None:
    verdict, left, right = explained
    (differs,) = verdict.contracts["differs_in"]
    write_report(tmp_path / "page.html", verdict, left, right)
    page = (tmp_path / "page.html").read_text()
    told = words(page)
    assert differs["sentence"] in told
    assert f"≠ rounding.silu {differs['left']} {differs['right']}" in told and told.count("≠ rounding") == 1


def test_an_inference_without_an_answer_says_why(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("norm", 2), "digest")
    reason = "the trace holds only digests of norm; capture with --level sampled or full"
    answers = [
        Inference("norm", "rms_norm", engine, "inconclusive", reason).to_json() for engine in ("vllm", "megatron")
    ]

    def told_so(verdict: Verdict) -> None:
        verdict.contracts = {"left": answers[:1], "right": answers[1:], "differs_in": []}

    told = words(page_of(tmp_path, left, right, told_so))
    assert "Inconclusive: vllm and megatron could not be explained" in told and f"megatron: {reason}" in told
    assert "Contract of" not in told


def test_the_nearest_contract_is_called_nearest(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("norm", 2))
    nearest = profile("vllm-0.32-cpu").contract("rms_norm", "bfloat16")
    miss = Inference("norm", "rms_norm", "vllm", "no_match", "no contract gives these bits", nearest=nearest)
    miss.elements, miss.matching, miss.max_ulp = 100, 90, 3

    def told_so(verdict: Verdict) -> None:
        verdict.contracts = {"left": [miss.to_json()], "right": [miss.to_json()], "differs_in": []}

    told = words(page_of(tmp_path, left, right, told_so))
    assert "the nearest contract is no match: 90 of 100 elements (90 %), worst 3 ulp" in told
    assert "order.sum cascade-8x4 (nearest) cascade-8x4 (nearest)" in told and "≠" not in told


def ablation() -> Ablation:
    base = LogprobStats(5, 5, 0.5, 0.1, 0.0, 0.0)
    half, none = replace(base, mean_abs_diff=0.05), LogprobStats(5, 0, 0.0, 0.0, 0.0, 0.0)

    def trial(aligned: list[str], now: LogprobStats) -> Trial:
        return Trial(aligned, now, Removed.of(base, now), "engine", "megatron", 1)

    boundaries = ["layers.0.input_layernorm"]
    norm = Unit(
        name="layers.*.input_layernorm",
        operator="rms_norm",
        boundaries=boundaries,
        interval=boundaries,
        elements=100,
        differing=10,
        max_abs=0.5,
        max_ulp=1,
        in_minimal=True,
    )
    norm.alone, norm.left_out = trial([norm.name], half), trial(["x"], base)
    norm.left_out.note = "a note"
    norm.differs_in = [{"field": "rounding.normalised", "sentence": f"it rounds {EVIL} first"}]
    origins = [
        Origin("layers.0.input_layernorm", norm.name, [], 0, 0, 100, 10, 0.5, 1, half, 0.5, True),
        Origin("layers.0.mlp.act", "layers.*.mlp.act", [], 0, 0, 100, 20, 0.5, 2, none, 0.5, True),
        *(Origin(f"layers.{n}.mlp.act", "layers.*.mlp.act", [], 0, 0, 100, 20, 0.5, 2) for n in (1, 2)),
        Origin("logprobs", "logprobs", ["logsumexp", "logprobs"], 0, 0, 5, 1, 0.5, 1, none, 0.0, False),
    ]
    return Ablation(
        "megatron",
        "vllm",
        "train",
        base,
        status="explained",
        summary="Two operators explain everything.",
        units=[norm],
        minimal=[norm.name],
        minimal_verified=True,
        together=trial([norm.name], none),
        pairs=[Pair((norm.name, "layers.*.mlp.act"), (0.5, 0.25), trial([], none))],
        origins=origins,
        unaligned={"logsumexp": "not observed"},
        runs={"megatron": 7},
        seconds=12.3,
    )


def test_an_ablation_shows_its_set_its_walk_and_its_pairs(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("layers.0.input_layernorm", 2))
    page = page_of(tmp_path, left, right, lambda verdict: verdict.ablation.append(ablation().to_json()))
    told = words(page)
    for part in (
        "Two operators explain everything.",
        "before 5 of 5 logprobs differ, max |Δ| 0.5, mean |Δ| 0.1 nats",
        "with the set aligned 0 of 5 logprobs differ",
        "layers.*.input_layernorm (dropping any one of them leaves a mismatch)",
        "1 layers.0.input_layernorm 10 % 1 5 of 5 0.05 50 %",
        "2 layers.0.mlp.act 20 % 2 0 of 5 0 50 %",
        "● layers.*.input_layernorm 10 % 1 50 % 100 %",
        "layers.*.input_layernorm + layers.*.mlp.act 50 % 25 % 100 %",
        "logsumexp not observed",
        "megatron 7; 12 s",
        "0, equal in every bit",
        f"it rounds {EVIL} first at layers.*.input_layernorm",
        "3 to 4 2 origins, without a forward of their own",
        "logsumexp → logprobs another boundary differs first after it",
    ):
        assert part in told, part
    assert "<script" not in page


def test_the_command_writes_the_page_and_refuses_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair(tmp_path, flip("layers.1.mlp.act", 2, 5))
    sides = [str(tmp_path / "left"), str(tmp_path / "right")]
    for arguments in (["compare", *sides], ["localize", "--rollout", sides[0], "--train", sides[1]]):
        page = tmp_path / f"{arguments[0]}.html"
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--html", str(page)])
        assert stop.value.code == ExitCode.DIVERGED and "layers.1.mlp.act" in words(page.read_text())
        assert "comparing" in capsys.readouterr().err
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--html", str(tmp_path / "none" / "page.html")])
        refusal = capsys.readouterr().err
        assert stop.value.code == ExitCode.USAGE and "does not exist" in refusal and "comparing" not in refusal


def test_shares_are_never_rounded_to_all_or_nothing() -> None:
    shares = {0.0: "0 %", 1.0: "100 %", 0.99996: "> 99.9 %", 1e-5: "< 0.1 %", -1e-5: "> −0.1 %", -0.0565: "−5.65 %"}
    assert {share: percent(share) for share in shares} == shares and percent(None) == "–"


@needs_browser
def test_no_page_scrolls_sideways_on_a_phone(explained: tuple[Verdict, Trace, Trace], tmp_path: Path) -> None:
    verdict, left, right = explained
    verdict = replace(verdict, ablation=[ablation().to_json()])
    write_report(tmp_path / "page.html", verdict, left, right)
    head = header()
    head.object.model["rope_scaling"] = {"a_long_name_without_any_space" * 5: 1}
    other = page_of(tmp_path, write(tmp_path / "a", values()), write(tmp_path / "b", values(), head))
    for page in ((tmp_path / "page.html").read_text().replace("<details>", "<details open>"), other):
        assert scroll_width(page, PHONE) == PHONE


def test_a_divergence_that_no_layer_hands_on_has_no_map(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("layers.1.mlp.act", 2, 5))
    assert "What each layer hands on is equal in every bit." in words(page_of(tmp_path, left, right))


def test_nothing_compared_is_told_as_nothing(tmp_path: Path) -> None:
    left = write(tmp_path / "a", {"norm": values()["norm"]})
    right = write(tmp_path / "b", {"logits": values()["logits"]})
    page = page_of(tmp_path, left, right)
    assert "No boundary was compared" in words(page) and "0 of 44 boundaries" in words(page)
    assert "How far apart" not in words(page) and page.count('class="box unobserved"') > 20


def mismatched(folder: Path, field: str, left: str, right: str) -> str:
    pair(folder, flip("norm", 1))

    def change(verdict: Verdict) -> None:
        verdict.verdict, verdict.not_comparable = "not_comparable", [Mismatch(field, left, right)]

    return page_of(folder, Trace(folder / "left"), Trace(folder / "right"), change)


def test_both_values_of_a_field_that_differs_are_short_and_whole_on_a_tap(tmp_path: Path) -> None:
    page = mismatched(tmp_path, "weights.norm.weight", *LONG)
    (table,) = re.findall(r'<table class="stacked">.*?</table>', page, re.DOTALL)
    for value, digit in zip(LONG, "12", strict=True):
        # The piece shows where they differ.
        assert f"<summary>…{'a' * 12}{digit * 12}…</summary>{value}</details>" in table
    assert all(f'data-head="{role}: ' in table for role in ("rollout", "train"))
    assert '<div class="scroll">' not in page[page.index("Fields in which") : page.index("</table>")]
    assert "<script" not in mismatched(tmp_path / "evil", "f", EVIL * 3, EVIL)


@needs_browser
def test_a_phone_shows_both_values_without_scrolling_sideways(tmp_path: Path) -> None:
    assert scroll_width(mismatched(tmp_path, "weights.model.layers.0.norm.weight", *LONG), PHONE) <= PHONE
