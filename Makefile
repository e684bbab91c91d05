# `make localize` and `make test` do all the set-up themselves; running them again costs a second.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.rlk-set-up
# Only the tests of the HIP sources need it, so only they install it.
CLANG := $(VENV)/.rlk-clang
# Two processes, each with whole files: a file's engine is started once.
SPREAD := -n 2 --dist loadfile
FAST := tests/test_layers.py tests/reference/operators tests/reference/reductions tests/reference/vectors \
	tests/diffcheck/base tests/diffcheck/trace tests/diffcheck/localize tests/diffcheck/test_rows.py \
	tests/diffcheck/capture/test_overrides.py tests/diffcheck/capture/test_megatron_weights.py \
	tests/integration/grpo/test_buffer.py tests/integration/grpo/test_metrics.py tests/integration/grpo/test_config.py
# The other Triton release whose compiled code is checked: for the tests, beside the environment, never in it.
OTHER_TRITON := $(VENV)/triton-3.6.0
# The trained model of some tests; its 93 MB are fetched once.
MODEL := $(VENV)/.rlk-model

.PHONY: help setup clang lock localize test test-fast test-exhaustive test-gfx942 lint api format conformance bench-localize bench-fastpath bench-strict bench-faults bench-reference bench-grpo nightly clean
.DEFAULT_GOAL := help

help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) $(OTHER_TRITON) $(MODEL) $(CLANG) ## Everything that is ever fetched; afterwards all targets work offline (3 minutes, 4.5 GB)

$(STAMP): requirements/engines-cpu.txt requirements/report.txt requirements/dev.txt pyproject.toml tools/setup.sh
	@PYTHON=$(PYTHON) bash tools/setup.sh $(VENV)
	@touch $@

localize: $(STAMP) ## Name the first boundary at which real vLLM and real Megatron-core diverge, and why
	@$(BIN)/rlk-diff localize --infer $(ARGS); code=$$?; [ $$code -eq 0 ] || [ $$code -eq 1 ] || exit $$code

clang: ## The compiler of the HIP sources: asks before it uses apt-get (RLK_APT=yes answers for you)
	@rm -f $(CLANG) && $(MAKE) --no-print-directory $(CLANG)

$(CLANG): tools/install-clang.sh | $(STAMP)
	@bash $<
	@touch $@

$(OTHER_TRITON): requirements/triton-3.6.txt | $(STAMP)
	@rm -rf $@ $@.part && $(BIN)/python -m pip install -q --no-deps --require-hashes --target $@.part -r $< && mv $@.part $@
	@touch $@

$(MODEL): | $(STAMP)
	@$(BIN)/python -c "from diffcheck.base.models import resolve_model; resolve_model('smollm2-135m', print)"
	@touch $@

lock: $(STAMP) ## Write the wheels' digests into requirements/ again, after a version was changed there
	$(BIN)/python -m tools.lock requirements/*.txt

test: $(STAMP) $(CLANG) $(OTHER_TRITON) $(MODEL) ## Lint, types and the default tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# One process of mypy's beside the tests: before them it would leave a core idle.
	$(BIN)/mypy & types=$$!; \
	RLK_OTHER_TRITON=$(CURDIR)/$(OTHER_TRITON) $(BIN)/python -m pytest $(SPREAD) --durations=20 -m "not exhaustive" $(ARGS); code=$$?; \
	wait $$types || { echo "mypy failed: its findings stand above the tests"; [ $$code -ne 0 ] || code=1; }; exit $$code

test-fast: $(STAMP) ## What a person runs before each commit: no engine is started, no kernel compiled
	$(BIN)/python -m pytest -q $(SPREAD) -m "not exhaustive and not engines" $(FAST) $(ARGS)

test-gfx942: $(STAMP) $(CLANG) $(OTHER_TRITON) ## Every kernel's gfx942 code executed in emulation, on both Tritons (20 minutes)
	RLK_EMULATE=gfx942 $(BIN)/python -m fastpath.emulation.report --jobs 2 $(ARGS)
	RLK_EMULATE=gfx942 PYTHONPATH=$(CURDIR)/$(OTHER_TRITON) $(BIN)/python -m fastpath.emulation.report --jobs 2 $(ARGS)

test-exhaustive: $(STAMP) $(OTHER_TRITON) ## All 2^32 inputs and other hour-long proofs; resumes where it stopped
	$(BIN)/python -m tests.reference.exhaustive $(ARGS)
	RLK_OTHER_TRITON=$(CURDIR)/$(OTHER_TRITON) $(BIN)/python -m pytest -m exhaustive

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

api: $(STAMP) ## Pages of the Python API, out of the docstrings, in build/api (no network)
	$(BIN)/python -m sphinx -q -W -b html -d build/api-doctrees docs/api build/api

format: $(STAMP) ## Put the code into ruff's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-localize: $(STAMP) ## Time of localize, throughput of compare, cost of capture
	$(BIN)/python -m diffcheck.benchmarks run $(ARGS)

conformance: $(STAMP) ## Kernels against the reference in bits: on this machine's GPU, or interpreted
	$(BIN)/python -m fastpath.conformance $(ARGS)

bench-fastpath: $(STAMP) ## Speed of the kernels on this machine's GPU, against named peers
	$(BIN)/python -m fastpath.benchmarks $(ARGS)

bench-strict: $(STAMP) ## Time of the strict path in vLLM and Megatron-core, against the native one
	$(BIN)/python -m integration.benchmarks $(ARGS)

nightly: $(STAMP) ## 200 GRPO steps, strict and native, checked and reported; goes on where it stopped
	$(BIN)/python -m integration.grpo.nightly $(ARGS)

bench-grpo: $(STAMP) ## Time of a strict GRPO step against a native one, by phase
	$(BIN)/python -m integration.grpo.benchmarks $(ARGS)

bench-faults: $(STAMP) ## Every fault of the library injected and named, every control left equal; resumes
	$(BIN)/rlk-diff faults --all --json diffcheck/results/faults.json $(ARGS)
	$(BIN)/rlk-diff faults --all --real --json diffcheck/results/faults.json $(ARGS)

bench-reference: $(STAMP) ## Speed of the specification on one core, against named peers
	$(BIN)/python -m reference.benchmarks $(ARGS)

clean: ## Remove the environment
	rm -rf $(VENV)
