"""The report: everything that was compared is on it, nothing comes from outside, and it fits a phone."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from diffcheck.base.errors import ExitCode, RlkError
from integration.grpo.report.command import write
from integration.grpo.report.figures import figures, save
from integration.grpo.report.read import Run, read_run
from tests.diffcheck.report.browser import DESKTOP, PHONE, needs_browser, scroll_width
from tests.integration.grpo.report import run_cases


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("runs")
    return run_cases.write(root / "strict", 12), run_cases.write(
        root / "native", 12, mode="native", drift=1e-3, times=0.5
    )


@pytest.fixture(scope="module")
def arms(folders: tuple[Path, Path]) -> tuple[Run, Run]:
    return read_run(folders[0]), read_run(folders[1])


@pytest.fixture(scope="module")
def written(folders: tuple[Path, Path]) -> tuple[str, str]:
    """What the terminal and the page say."""
    stream = io.StringIO()
    code = write(*folders, None, True, Console(file=stream, width=110))
    assert code is ExitCode.EQUAL
    return stream.getvalue(), (folders[0] / "report.html").read_text()


def test_both_say_what_was_compared(written: tuple[str, str], arms: tuple[Run, Run]) -> None:
    tokens = arms[0].compared
    for told in written:
        told = re.sub(r"<[^>]*>|\s+", " ", told)
        assert f"0 of {tokens:,} logprobs differ in 12 steps" in told
        assert f"{tokens:,} of {tokens:,} logprobs differ in 12 steps" in told
        assert f"{tokens:,}, {tokens:,} compared, 0 not" in told and "72 consumed" in told
        assert "63 of 63 boundaries observed" in told
        assert "attention" in told and f"{1:064x}"[:16] in told
    names = ("rollout_<wbr>corr/<wbr>k3_<wbr>kl", "token_<wbr>mult_<wbr>prob_<wbr>error")
    for text in (*names, "Figure 1", "Figure 5", "block_size", "2.00"):
        assert text in written[1], text


def test_the_page_is_one_file_with_nothing_from_outside(written: tuple[str, str]) -> None:
    page = written[1]
    assert not re.search(r"https?://|url\(|@import|<link|src=|<script", page)
    assert "&lt;script&gt;no&lt;/script&gt;" in page


def test_a_strict_run_that_differs_is_diverged_and_says_where(tmp_path: Path) -> None:
    folder = run_cases.write(tmp_path / "run", 2, drift=0.5)
    stream = io.StringIO()
    assert write(folder, None, tmp_path / "out.html", False, Console(file=stream, width=200)) is ExitCode.DIVERGED
    worst = read_run(folder).worst
    assert f"step 2, sample {worst['max_abs_sample']}, position {worst['max_abs_position']}" in stream.getvalue()
    assert 'class="verdict diverged"' in (tmp_path / "out.html").read_text()
    assert not (folder / "report.html").exists()


def test_arms_of_different_experiments_are_not_drawn_together(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from tests.integration.grpo import buffer_cases

    before, buffer_cases.PROMPTS[0][0] = buffer_cases.PROMPTS[0][0], 99
    try:
        other = run_cases.write(tmp_path / "other", 2)
    finally:
        buffer_cases.PROMPTS[0][0] = before
    with pytest.raises(RlkError, match="step 1 has other prompts"):
        write(folders[0], other, None, False, Console(file=io.StringIO()))


def test_an_output_that_cannot_be_written_is_named_before_the_work(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(RlkError, match="no-such-folder"):
        write(folders[0], None, tmp_path / "no-such-folder" / "r.html", False, Console(file=io.StringIO()))


def test_files_of_figures_are_the_same_bytes_each_time(arms: tuple[Run, Run], tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(figures(*arms), tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert [name[:8] for name in names] == [f"figure-{i}" for i in range(1, 6)]
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)


def test_strict_and_native_are_in_one_drawing_and_zero_has_its_own_line(arms: tuple[Run, Run]) -> None:
    first = figures(*arms)[0]
    counts, worst = first.panels
    assert [series.label for series in counts.series] == ["compared", "strict: differ", "native: differ"]
    assert {y for _, y in counts.series[1].points} == {0.0}
    assert counts.series[2].points == counts.series[0].points
    assert [y for _, y in worst.series[1].points] == sorted(y for _, y in worst.series[1].points) and worst.log


def test_one_step_without_kl_and_with_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = run_cases.write(tmp_path / "run", 1, drift=-2000.0)
    run_cases.edit_step(folder, 1, kl_ref=None)
    record = json.loads((folder / "steps.jsonl").read_text())
    assert record["ratio_max"] == 0.0 or record["note"]
    stream = io.StringIO()
    write(folder, None, None, False, Console(file=stream))
    names = [figure.name for figure in figures(read_run(folder))]
    assert "figure-4-kl" not in names and "figure-1-mismatch" in names


def test_tensorboard_reads_every_step_back(folders: tuple[Path, Path], written: tuple[str, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert written
    for folder in folders:
        run = read_run(folder)
        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        for tag, field in (
            ("rlk/mismatch_count", "mismatch_count"),
            ("trl/sampling/sampling_logp_difference/max", "max_abs_diff"),
        ):
            found = [(event.step, event.value) for event in events.Scalars(tag)]
            assert found == [(step["step"], pytest.approx(step[field])) for step in run.steps], tag
        assert len(events.Scalars("verl/training/rollout_probs_diff_mean")) == 12
        assert len(events.Scalars("rlk/seconds/total")) == 12


@needs_browser
def test_the_page_does_not_scroll_sideways(written: tuple[str, str]) -> None:
    page = written[1].replace("<details>", "<details open>")
    for window in (PHONE, DESKTOP):
        # The page is longer than the frame: its vertical bar takes 15 pixels.
        assert scroll_width(page, window) == window - 15
