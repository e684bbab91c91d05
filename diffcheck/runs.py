"""Whole runs: start engines, capture both sides, compare. What the commands do, as functions."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffcheck.ablate import Side, ablate
from diffcheck.base.boundaries import graph
from diffcheck.base.errors import InputError
from diffcheck.base.model_notes import model_notes
from diffcheck.base.models import built_in_samples, resolve_model
from diffcheck.base.progress import Progress
from diffcheck.base.recorded import RECORDED
from diffcheck.base.samples import Sample, check_samples, load_samples
from diffcheck.capture.adapter import ENGINES, GENERATING, CaptureResult
from diffcheck.capture.graph_run import graph_run, note_of
from diffcheck.capture.matching import check_matches
from diffcheck.capture.overrides import Override, apply_overrides
from diffcheck.capture.patches import Patch
from diffcheck.capture.plan import CapturePlan, EngineOptions, Phase
from diffcheck.capture.recorded import write_recorded
from diffcheck.capture.session import EngineSession
from diffcheck.capture.strict import check_start
from diffcheck.capture.switches import parse_switches
from diffcheck.infer import explain
from diffcheck.infer.model import find_model
from diffcheck.infer.repeat import unrepeated, withdraw
from diffcheck.localize import localize
from diffcheck.localize.prompts import PROMPT_LOGPROBS
from diffcheck.localize.verdict import Verdict
from diffcheck.trace.joined import JoinedTrace, join, partners, samples_of
from diffcheck.trace.reader import Trace
from diffcheck.trace.roles import ROLES, side_names
from diffcheck.trace.schema import HEADER
from reference.models.config import ModelConfig

#: Tokens generated a sample when the rollout engine writes the responses.
GENERATE = 32


@dataclass(frozen=True)
class RunSettings:
    """What ``localize`` and ``capture`` share; the command line's options one to one."""

    model: str = "tiny-qwen3"
    samples: Path | None = None
    phase: Phase = "decode"
    dtype: str = "bfloat16"
    device: str = "cpu"
    tensor_parallel: int = 1
    profile: str | None = None
    level: str = "full"
    layers: tuple[int, int] | None = None
    generate: int = GENERATE
    seed: int = 0
    #: None: the samples' own, else 1.
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    overrides: tuple[Override, ...] = ()
    #: Switches of the engine, NAME=VALUE; the rollout side's where there are two.
    options: tuple[str, ...] = ()
    #: Functions that change a live model before the run, of either side.
    patches: tuple[Patch, ...] = ()
    #: The train side's, where they are not the rollout's.
    train_phase: Phase | None = None
    train_tensor_parallel: int | None = None
    train_profile: str | None = None
    train_options: tuple[str, ...] = ()
    #: Folder for traces and engine logs; None keeps none.
    keep: Path | None = None
    #: Find each side's contract at the first divergence.
    infer: bool = False
    #: Find the operators whose alignment makes the logprobs equal.
    ablate: bool = False
    #: Write the verdict as a page, while the traces are there.
    html: Path | None = None
    #: Fields that the user set: those that could not take effect are refused.
    given: frozenset[str] = frozenset()

    def of_train(self) -> RunSettings:
        """The settings of the train side."""
        return replace(
            self,
            phase=self.train_phase or self.phase,
            tensor_parallel=self.train_tensor_parallel or self.tensor_parallel,
            profile=self.train_profile or self.profile,
            options=self.train_options,
        )


@dataclass
class Timings:
    """Wall seconds by step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)

    def mark(self, step: str) -> None:
        """Book the time since the last mark (or the start) under ``step``."""
        now = time.monotonic()
        self.seconds[step] = round(self.seconds.get(step, 0.0) + now - self._since, 2)
        self._since = now


@dataclass(frozen=True)
class LoadedModel:
    name: str
    folder: Path
    config: ModelConfig

    @classmethod
    def load(cls, name: str, announce: Callable[[str], None]) -> LoadedModel:
        folder, config = resolve_model(name, announce)
        return cls(name, folder, config)


def is_trace(name: str) -> bool:
    """Whether a side is a trace folder rather than an engine."""
    return name not in (*ENGINES, RECORDED) and (Path(name) / HEADER).exists()


def check_side(name: str) -> None:
    """Raise InputError unless ``name`` is an engine, a record of logprobs, or a trace folder."""
    if name not in (*ENGINES, RECORDED) and not Path(name).is_dir():
        known = ", ".join(ENGINES)
        raise InputError(
            f"{name!r} is neither an engine nor a trace folder", f"engines: {known}; or a folder of capture"
        )


#: Settings that only a side's engine could follow.
_OF_ROLLOUT = {"generate", "seed"}
_OF_TRAIN = {"train_phase", "train_tensor_parallel", "train_profile"}
_OF_ENGINES = {"phase", "dtype", "device", "tensor_parallel", "profile", "level", "layers", "keep"} | {
    "temperature",
    "top_p",
    "top_k",
}


def option_name(setting: str) -> str:
    """The command line's name of a setting."""
    return "--" + setting.replace("tensor_parallel", "tp").replace("_", "-")


def _check_used(settings: RunSettings, rollout: str, train: str) -> None:
    """Refuse what could not take effect, because the side that it belongs to is recorded already.

    Raises:
        InputError: an option of a trace; it is named.
    """
    sides = {"rollout": rollout, "train": train}
    idle = _OF_TRAIN if is_trace(train) else set()
    if is_trace(rollout) or rollout == RECORDED:
        idle = idle | _OF_ROLLOUT | (_OF_ENGINES if is_trace(train) else set())
    if is_trace(rollout) and is_trace(train) and not settings.infer:
        idle = idle | {"model"}
    if unused := sorted(idle & settings.given):
        recorded = ", ".join(f"the {side} side is recorded" for side, name in sides.items() if name not in ENGINES)
        raise InputError(
            f"{option_name(unused[0])} would change nothing: {recorded}",
            "leave it out, or give an engine as that side",
        )


def _check_sides(settings: RunSettings, rollout: str, train: str) -> None:
    """Raises:
    InputError: a side that is none, or something asked of a side that cannot do it.
    """
    check_side(rollout)
    check_side(train)
    _check_used(settings, rollout, train)
    if train == RECORDED:
        raise InputError(
            f"--train {RECORDED}: a samples file holds what the rollout recorded", f"use --rollout {RECORDED}"
        )
    if rollout == RECORDED:
        if settings.samples is None:
            raise InputError(f"--rollout {RECORDED} needs a file with rollout_logprobs", "give it with --samples")
        for name, asked in (("--infer", settings.infer), ("--ablate", settings.ablate)):
            if asked:
                raise InputError(
                    f"{name}: a record holds logprobs and no operator's values", "roll out the samples with an engine"
                )
    for role, name, switches in (("rollout", rollout, settings.options), ("train", train, settings.train_options)):
        if name in ENGINES:
            parse_switches(name, switches, f"--{role}-option")
            continue
        if switches:
            raise InputError(
                f"--{role}-option {switches[0]}: the {role} side is no live engine", "give options to a side that runs"
            )
        for patch in settings.patches:
            if patch.side == role:
                raise InputError(f"--patch {patch.file}: the {role} side is no live engine", "patch a side that runs")
        for override in settings.overrides:
            if override.side == role:
                raise InputError(
                    f"override {override.text!r}: the {role} side is no live engine", "override a side that runs"
                )


def choose_samples(settings: RunSettings, model: LoadedModel, engine: str) -> list[Sample]:
    """The samples to run: the user's file, or the built-in ones; the latter lose their responses where ``engine`` can
    write its own.

    Raises:
        InputError: see `load_samples` and `check_samples`.
    """
    generated = engine in GENERATING and settings.phase == "decode"
    if settings.samples is not None:
        # What another system recorded stays beside what the engines here compute.
        samples = [replace(s, recorded_logprobs=s.rollout_logprobs) for s in load_samples(settings.samples)]
    else:
        samples = built_in_samples(model.name, model.folder, model.config)
        if generated:
            samples = [replace(s, response_token_ids=()) for s in samples]
    check_samples(samples, model.config.vocab_size, model.config.max_position_embeddings, scored=not generated)
    if all(s.response_token_ids for s in samples) and (unused := sorted({"generate", "seed"} & settings.given)):
        raise InputError(
            f"{option_name(unused[0])} would change nothing: {engine} scores given responses and draws none",
            "leave it out, or roll out with vllm or transformers in phase decode",
        )
    return samples


def engine_options(
    settings: RunSettings, model: LoadedModel, engine: str, samples: Sequence[Sample], role: str = "train"
) -> EngineOptions:
    """How to start ``engine`` for these samples.

    Args:
        role: "rollout" or "train": patches of that side apply.
    """
    c = model.config
    longest = max(len(s.token_ids) + (0 if s.response_token_ids else settings.generate) for s in samples)
    if longest > c.max_position_embeddings:
        limit = c.max_position_embeddings
        raise InputError(
            f"a sample of {longest} tokens exceeds the model's {limit} positions", "shorten it or --generate less"
        )
    for what, count in (("attention heads", c.num_attention_heads), ("key-value heads", c.num_key_value_heads)):
        if count % settings.tensor_parallel:
            raise InputError(
                f"--tp {settings.tensor_parallel}: {count} {what} cannot be divided by it", "choose a divisor as --tp"
            )
    patches = tuple((str(p.file), p.function) for p in settings.patches if p.side == role)
    options = EngineOptions(
        engine=engine,
        model=model.folder,
        dtype=settings.dtype,
        tensor_parallel=settings.tensor_parallel,
        device=settings.device,
        profile=settings.profile,
        # Rounded up, so that engines allocate the same for similar samples; one more, so that vLLM may sample after the
        # last token.
        max_length=min(c.max_position_embeddings, -(-(longest + 1) // 64) * 64),
        max_sequences=max(8, min(len(samples), 64)),
        # On a GPU vLLM is judged as it serves: see `graph_run`. A replayed graph would not run a patch.
        extra=({"graphs": True} if engine == "vllm" and settings.device == "cuda" and not patches else {})
        | parse_switches(engine, settings.options, "option"),
        patches=patches,
    )
    check_start(options, c)
    return options


def capture_plan(settings: RunSettings, samples: Sequence[Sample], out: Path) -> CapturePlan:
    """The plan of one side before its overrides.

    Raises:
        InputError: the samples were drawn at several temperatures, or at another than --temperature; no such top-p.
    """
    drawn = {s.temperature for s in samples if s.temperature is not None}
    if settings.temperature is not None:
        drawn.add(settings.temperature)
    if len(drawn) > 1:
        listed = " and ".join(str(t) for t in sorted(drawn))
        raise InputError(f"temperatures {listed} in one run", "score samples of one temperature at a time")
    if not 0 < settings.top_p <= 1:
        raise InputError(f"--top-p {settings.top_p:g} keeps no token", "give more than 0, and at most 1 (all tokens)")
    return CapturePlan(
        samples=tuple(samples),
        out=out,
        phase=settings.phase,
        level=settings.level,
        layers=settings.layers,
        generate=settings.generate,
        seed=settings.seed,
        temperature=drawn.pop() if drawn else 1.0,
        top_p=settings.top_p,
        top_k=settings.top_k,
    )


def run_capture(settings: RunSettings, engine: str, out: Path, progress: Progress, *, overwrite: bool) -> CaptureResult:
    """``rlk-diff capture``: one engine, one trace. Overrides of either side apply to it.

    Raises:
        RlkError: anything a user can mend.
    """
    if engine == RECORDED:
        if settings.options or settings.overrides or settings.patches:
            raise InputError(
                f"--engine {RECORDED} runs no engine that could be changed", "leave --option, --override, --patch out"
            )
        if settings.samples is None:
            raise InputError(f"--engine {RECORDED} needs a file with rollout_logprobs", "give it with --samples")
        return write_recorded(load_samples(settings.samples), settings.samples, out, overwrite=overwrite)
    model = LoadedModel.load(settings.model, lambda text: progress(text, 0, 0))
    samples = choose_samples(settings, model, engine)
    options, plan = apply_overrides(
        settings.overrides,
        engine_options(settings, model, engine, samples),
        replace(capture_plan(settings, samples, out), overwrite=overwrite),
    )
    check_matches(plan, graph(model.config, options.tensor_parallel))
    with EngineSession(options, progress, _log(settings, engine, "capture")) as session:
        return session.capture(plan)


def run_compare(
    left: Path,
    right: Path,
    progress: Progress,
    *,
    model: str | None = None,
    infer: bool = False,
    html: Path | None = None,
) -> Verdict:
    """``rlk-diff compare``: two traces, no engine.

    Args:
        model: the traced model, where it is not found by itself. Only inference reads it.
        infer: find each side's contract at the first divergence.
        html: write the verdict as a page.

    Raises:
        InputError: the traced model is not found, or a side is a record.
        TraceError: a trace is damaged.
    """
    ours = Trace(left)
    theirs = join(ours, Trace(right))
    for trace in (ours, theirs):
        if infer and trace.header.engine == RECORDED:
            raise InputError(f"{trace.folder}: --infer: a record holds no operator's values", "compare without --infer")
    verdict = localize(ours, theirs, progress)
    if infer and verdict.first_divergence and verdict.first_divergence.boundary != PROMPT_LOGPROBS:
        folder = find_model(ours.header, model, lambda text: progress(text, 0, 0))
        explain(verdict, ours, theirs, folder, progress=progress)
    if html:
        from diffcheck.report.html import write_report

        write_report(html, verdict, ours, theirs, progress)
    return verdict


@dataclass
class _Captured:
    """One side of a run: its trace and, where it is live, its engine and the plan, responses included."""

    trace: Path
    session: EngineSession | None = None
    plan: CapturePlan | None = None
    #: Whether it wrote its own responses.
    drew: bool = False
    #: How its graphs' logprobs agree with the observed ones, where it has graphs.
    graphs: dict[str, Any] | None = None


def run_localize(settings: RunSettings, rollout: str, train: str, progress: Progress) -> tuple[Verdict, Timings]:
    """``rlk-diff localize``: both sides, then the verdict.

    The rollout side goes first: its samples, with the responses it wrote, are what the train side scores. Engines start
    at the same time, because starting is most of what they do.

    Raises:
        RlkError: anything a user can mend.
    """
    timings = Timings()
    _check_sides(settings, rollout, train)
    if settings.ablate:
        _check_ablation(settings, rollout, train)
    with ExitStack() as stack:
        folder = settings.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlk-localize-")))
        folder.mkdir(parents=True, exist_ok=True)
        sides = _capture_sides(settings, rollout, train, folder, progress, stack, timings)
        left = Trace(sides["rollout"].trace)
        right = join(left, Trace(sides["train"].trace))
        verdict = localize(left, right, progress, recorded=_records_beside(settings, left, is_trace(rollout)))
        _note_graphs(verdict, sides)
        timings.mark("compare")
        # Prompt logprobs are no operator's output.
        first = verdict.first_divergence
        why = (settings.infer or settings.ablate) and not (first and first.boundary == PROMPT_LOGPROBS)
        if settings.ablate and isinstance(right, JoinedTrace):
            raise InputError(
                f"{train}: --ablate puts one side's values into the other, and its samples are in another order",
                "capture both sides from one samples file",
            )
        if why and verdict.first_divergence and not withdraw(verdict, _unsteady(left.folder, right.folder, folder)):
            # Two traces may be of any model; live sides are of the named one.
            named = None if is_trace(rollout) and is_trace(train) and "model" not in settings.given else settings.model
            found = find_model(left.header, named, lambda text: progress(text, 0, 0), hint=settings.model)
            model = LoadedModel(settings.model, found, ModelConfig.from_folder(found))
            if settings.infer:
                explain(verdict, left, right, model.folder, progress=progress)
                timings.mark("infer")
            if settings.ablate:
                _ablate(verdict, sides, model, settings, progress)
                timings.mark("ablate")
        if any(side.session for side in sides.values()):
            folder_of_model, _ = resolve_model(settings.model)
            verdict.notes += model_notes(folder_of_model, settings.dtype)
        verdict.evidence["seconds"] = timings.seconds
        if settings.html:
            from diffcheck.report.html import write_report

            write_report(settings.html, verdict, left, right, progress)
            timings.mark("page")
    return verdict, timings


def _note_graphs(verdict: Verdict, sides: dict[str, _Captured]) -> None:
    """Say how the graphs of a live side agree with what was observed; a strict side's must, in every bit."""
    for side, captured in sides.items():
        if captured.graphs is None:
            continue
        note = note_of(side, captured.graphs)
        verdict.evidence.setdefault("graphs", {})[side] = captured.graphs
        verdict.notes.append(note)
        if captured.graphs["mismatch_count"] and "strict" in captured.graphs and verdict.verdict == "equal":
            verdict.verdict, verdict.summary = "diverged", note


def _check_ablation(settings: RunSettings, rollout: str, train: str) -> None:
    """Raises:
    InputError: no live engine, or traces without values.
    """
    if is_trace(rollout) and is_trace(train):
        raise InputError("--ablate changes a live forward, and both sides are traces", "give an engine as one side")
    if settings.level != "full":
        raise InputError(f"--ablate needs all values, not --level {settings.level}", "use --level full")
    for name in (rollout, train):
        if is_trace(name) and (level := Trace(Path(name)).header.level) != "full":
            raise InputError(f"{name}: --ablate needs all values, not a trace of level {level}", "capture it as full")


def _ablate(
    verdict: Verdict, sides: dict[str, _Captured], model: LoadedModel, settings: RunSettings, progress: Progress
) -> None:
    """Fill ``verdict.ablation``: the train side's forward, if it is live, with the rollout's operators."""
    with tempfile.TemporaryDirectory(prefix="rlk-ablate-") as scratch:
        both = {
            role: Side(role, Trace(side.trace), Path(scratch), side.session, side.plan) for role, side in sides.items()
        }
        engines = [both[role].trace.header.engine for role in ROLES]
        for role, label in zip(ROLES, side_names(engines[0], engines[1]), strict=True):
            both[role].label = label
        recorded = [side for role, side in both.items() if sides[role].drew]
        if withdraw(verdict, {side.role: side.unlike_itself() for side in recorded}):
            return
        host, donor = (both["train"], both["rollout"]) if both["train"].live else (both["rollout"], both["train"])
        same = donor.trace.header.tensor_parallel == host.trace.header.tensor_parallel
        nodes = graph(model.config, host.trace.header.tensor_parallel if same else 1)
        answer = ablate(host, donor, nodes, model.folder, infer=settings.infer, progress=progress)
        verdict.ablation = [answer.to_json()]
        if answer.void:
            verdict.verdict = "inconclusive"
            verdict.summary = f"{verdict.summary} Why is not known: {answer.reason}."


def _capture_sides(
    settings: RunSettings,
    rollout: str,
    train: str,
    folder: Path,
    progress: Progress,
    stack: ExitStack,
    timings: Timings,
) -> dict[str, _Captured]:
    """Both sides by role: "rollout" and "train"."""
    sides = {"rollout": rollout, "train": train}
    live = [side for side, name in sides.items() if name in ENGINES]
    captured = {side: _Captured(Path(name)) for side, name in sides.items()}
    if rollout == RECORDED:
        assert settings.samples is not None
        out = folder / f"rollout-{RECORDED}"
        shutil.rmtree(out, ignore_errors=True)
        captured["rollout"] = _Captured(write_recorded(load_samples(settings.samples), settings.samples, out).trace)
    if not live:
        return captured
    model = LoadedModel.load(settings.model, lambda text: progress(text, 0, 0))
    if is_trace(rollout) or rollout == RECORDED:
        samples = samples_of(Trace(captured["rollout"].trace))
        check_samples(samples, model.config.vocab_size, model.config.max_position_embeddings, scored=True)
    else:
        samples = choose_samples(settings, model, rollout)
    timings.mark("model and samples")
    sessions, plans, starts = {}, {}, {}
    # Both sides are checked before the first engine starts.
    for side in live:
        name = sides[side]
        out = folder / f"{side}-{name}"
        own = settings if side == "rollout" else settings.of_train()
        shutil.rmtree(out, ignore_errors=True)
        options, plan = apply_overrides(
            [o for o in settings.overrides if o.side == side and o.field != "swap_tokens"],
            engine_options(own, model, name, samples, side),
            capture_plan(own, samples, out),
        )
        check_matches(plan, graph(model.config, options.tensor_parallel))
        starts[side], plans[side] = options, plan
    for side in live:
        log = _log(settings, sides[side], side)
        sessions[side] = stack.enter_context(EngineSession(starts[side], progress, log))
    for side in live:
        sessions[side].wait_ready()
        timings.mark(f"start {sides[side]}" if rollout != train else f"start {sides[side]} ({side})")
        # Tokens are swapped only now: the train side's samples are those that the rollout wrote.
        swaps = [o for o in settings.overrides if o.side == side and o.field == "swap_tokens"]
        _, plan = apply_overrides(swaps, sessions[side].options, replace(plans[side], samples=tuple(samples)))
        result = sessions[side].capture(plan)
        timings.mark(f"run {sides[side]}" if rollout != train else f"run {sides[side]} ({side})")
        if settings.infer or settings.ablate:
            shutil.rmtree(_again(result.trace), ignore_errors=True)
            sessions[side].capture(replace(plan, out=_again(result.trace), level="digest"))
            timings.mark("run again")
        drew = any(not s.response_token_ids for s in plan.samples)
        finished = replace(plan, samples=tuple(result.samples))
        captured[side] = _Captured(result.trace, sessions[side], finished, drew)
        if sessions[side].options.extra.get("graphs"):
            captured[side].graphs = graph_run(sessions[side], finished, result.samples)
            timings.mark("run graphs")
        if side == "rollout":
            samples = result.samples
    return captured


def _records_beside(settings: RunSettings, left: Trace, is_given: bool) -> list[tuple[float, ...] | None] | None:
    """What a samples file beside a rollout trace recorded of the trace's samples; None where there is no such file.

    Raises:
        InputError: a sample of the file is none of the trace's.
    """
    if settings.samples is None or not is_given:
        return None
    ours, given = samples_of(left), load_samples(settings.samples)
    records: list[tuple[float, ...] | None] = [None] * len(ours)
    for i, j in enumerate(partners(given, ours)):
        if j is None or ours[j].token_ids != given[i].token_ids:
            raise InputError(
                f"{settings.samples}: sample {i} is none of {left.folder}'s, whose samples are compared",
                "give the samples that the trace was made of, or none",
            )
        records[j] = given[i].rollout_logprobs
    return records if any(records) else None


def _again(trace: Path) -> Path:
    """Where the second run of a live side goes, which shows whether it repeats itself."""
    return trace.with_name(f"{trace.name}.again")


def _unsteady(left: Path, right: Path, folder: Path) -> dict[str, str]:
    """Side -> how its second run differs from its first; empty where it does not.

    Only sides captured into this run's ``folder`` have a second run. What lies beside a trace that the user gave is
    theirs.
    """
    live = {side: trace for side, trace in (("left", left), ("right", right)) if trace.parent == folder}
    names = dict(zip(("left", "right"), side_names(Trace(left).header.engine, Trace(right).header.engine), strict=True))
    found = {side: unrepeated(Trace(trace), Trace(_again(trace)), names[side]) for side, trace in live.items()}
    for trace in live.values():
        shutil.rmtree(_again(trace), ignore_errors=True)
    return found


def _log(settings: RunSettings, engine: str, side: str) -> Path | None:
    if settings.keep is None:
        return None
    settings.keep.mkdir(parents=True, exist_ok=True)
    return settings.keep / f"{side}-{engine}.log"
