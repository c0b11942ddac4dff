PYTHON ?= python3
VENV ?= .venv
OP ?= mla_decode
ARGS ?= --op $(OP) --suite r1-tp8 --budget 25s --per-case 25s
# The tests that `make test-all` runs, as pytest's -m takes them; empty: all. CI gives `slow` after `make test`.
MARK ?=
# The number of test processes; on 2 cores a third one uses the time in which the others wait.
WORKERS ?= 3

# A folder of wheels that set-up uses instead of an index; `make wheels` makes it for the Python in FOR.
WHEELS ?=
# The address of an index of PyTorch's builds, if pip's own index has none for this machine.
TORCH_INDEX ?=

SET_UP = @$(PYTHON) tools/set_up.py --venv $(VENV) $(if $(WHEELS),--wheels "$(WHEELS)") \
	$(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
IN_VENV = @$(VENV)/bin/python -m
# Files run in the order of their names. If those with most tests came first, a few long files would run last, alone.
# A test process that dies ends the suite, as xdist would wait for ever for one that replaces it.
PYTEST = $(IN_VENV) pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
SOURCES = $(wildcard kernels harness shapes tools tests)

# Compiled Python is kept: tests start hundreds of processes, and each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help pictures run test test-all lint format set-up set-up-test set-up-tilelang wheels other-triton clean

help: ## what there is (this list)
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo 'Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  OP=$(OP)  ARGS="$(ARGS)"  WORKERS=$(WORKERS)'

run: set-up ## set up, then measure: make run OP=fused_moe, or ARGS="--op mla_decode --suite smoke"
	$(IN_VENV) harness run $(ARGS)

pictures: set-up ## the chart of the README, from a committed run, for light and for dark
	$(IN_VENV) harness report results/h200/mla_decode-b64 --svg docs/pictures --chart 'ranking-*'
	mv docs/pictures/ranking-*.svg docs/pictures/mla-decode.svg
	sed 's/white/#0d1117/; s/#222222/#e6edf3/g' docs/pictures/mla-decode.svg >docs/pictures/mla-decode-dark.svg

test: lint ## set up, lint, then the quick tests
	$(PYTEST) -m "not slow"

test-all: lint other-triton set-up-tilelang ## set up, lint, then all tests, the slow ones too (MARK=slow: those alone)
	$(PYTEST) -m "$(MARK)"

lint: set-up-test ## what ruff and mypy find, and whether the format is ruff's
	$(IN_VENV) ruff check $(SOURCES)
	$(IN_VENV) ruff format --check $(SOURCES)
	$(IN_VENV) mypy

format: set-up-test ## put imports and format right
	$(IN_VENV) ruff check --fix $(SOURCES)
	$(IN_VENV) ruff format $(SOURCES)

set-up: ## make .venv, or bring it up to date
	$(SET_UP)

wheels: ## what a node without a registry needs: make wheels FOR=3.12, then there make run WHEELS=wheels-3.12
	@$(PYTHON) tools/wheels.py --for "$(FOR)" $(if $(ALL),--all) \
		$(if $(MACHINE),--machine $(MACHINE)) "$(or $(WHEELS),wheels-$(FOR))"

set-up-test:
	$(SET_UP) --extra test

set-up-tilelang: set-up-test
	$(SET_UP) --extra tilelang

other-triton: set-up-test
	@test -d .other-triton/triton || $(VENV)/bin/python -m pip install -q --no-deps --target .other-triton triton==3.6.0

clean: ## remove .venv and caches; recorded runs stay
	rm -rf $(VENV) .other-triton build .pytest_cache .ruff_cache .mypy_cache .benchmarks *.egg-info
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
