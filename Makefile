# Every target starts from nothing: it creates .venv, and renews it when a file that decides its contents has changed.
# There is one .venv: the demo installs a part of what the checks need, and the checks add the rest.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-demo
BENCH_STAMP := .venv/.installed-bench
export PYTHON
# What decides the contents of .venv, and of the extension that pip builds.
BUILD := setup.cfg setup.py constraints.txt pyproject.toml $(wildcard kernels/native/*c)
# The package is the repository root, so a type checker finds it under its name only through a link.
TYPECHECK := .venv/typecheck

.DEFAULT_GOAL := help
.PHONY: help demo test full quick lanes mutants lint types docs bench gpu release clean
# The checks print one after another also under `make -j`.
.NOTPARALLEL:

help:
	@echo "make demo    train the example on two local processes (examples/train_ddp.py)"
	@echo "make test    the whole check: lint, types, docs, tests"
	@echo "make full    the same and the tests that take long: benchmarks, soaks, more processes, the lanes"
	@echo "make lanes   the fast tests for other processors and threads, with new workers, in a drawn order (SEED=)"
	@echo "make quick   lint, types and the fast tests: every loss and public verb, on several processes too"
	@echo "make mutants which changes of the package no test notices (SEED=0 NUMBER=20 FOLDER=)"
	@echo "make lint    ruff check, ruff format --check"
	@echo "make types   mypy"
	@echo "make docs    build the documentation into site/ (site/index.html), strictly and without the network"
	@echo "make bench   run every script in benchmarks/, one after another"
	@echo "make gpu     on a machine with CUDA (BUDGET=seconds PART=name): checks, speed, memory, tests, into benchmarks/results/gpu.json"
	@echo "make release build sdist and wheel into dist/, check them, use the wheel in an empty environment"
	@echo "make clean   remove .venv, site, build products and caches"
	@echo "PYTHON=...   the interpreter .venv is made with (default: python3)"

# Without bytecode: the demo imports a small part of what is installed, and Python compiles that part when it does.
$(DEMO_STAMP): $(BUILD)
	@echo "installing what the demo needs into .venv: 1.2 GB with torch for the CPU, a few minutes the first time"
	@.ci/install demo --no-compile
	@touch $@

$(STAMP): $(BUILD)
	@echo "installing what the checks need into .venv: 2.1 GB with torch for the CPU, a few minutes the first time"
	@.ci/install test,demo,integrations,docs
	@mkdir -p $(TYPECHECK)
	@ln -sfn ../.. $(TYPECHECK)/fullrank
	@touch $@ $(DEMO_STAMP)

# The peers of the benchmarks, for `make bench` alone.
$(BENCH_STAMP): $(STAMP)
	@echo "installing what the benchmarks compare with"
	@.ci/install test,bench
	@touch $@

# One thread per process: the processes share the cores, and torchrun warns when the number is not set.
demo: $(DEMO_STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_ddp.py

# Lint, types and documentation are jobs next to those of the tests.
test: $(STAMP)
	@$(BIN)/python tests/run.py --checks

full: $(STAMP)
	@$(BIN)/python tests/run.py --checks --full
	@$(BIN)/python tests/run.py --lanes

quick: $(STAMP)
	@$(BIN)/python tests/run.py --checks --quick

lanes: $(STAMP)
	@$(BIN)/python tests/run.py --lanes

SEED ?= 0
NUMBER := 20
FOLDER :=
mutants: $(STAMP)
	@$(BIN)/python tests/mutants.py --seed $(SEED) --number $(NUMBER) --folder "$(FOLDER)"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@MYPYPATH=$(TYPECHECK) $(BIN)/mypy

# The theme advertises on the terminal unless the variable is set.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(BENCH_STAMP)
	@set -e; found=; for script in benchmarks/*.py; do \
		[ -f "$$script" ] || continue; \
		found=1; echo "== $$script"; $(BIN)/python "$$script"; \
	done; [ -n "$$found" ] || echo "no scripts in benchmarks/"

# With the Python that you name: .venv has torch for the CPU.
gpu:
	@$(PYTHON) benchmarks/gpu.py $(if $(BUDGET),--budget $(BUDGET)) $(if $(PART),--part "$(PART)")

# All of a release that needs no account: .github/workflows/release.yml does the rest from a tag.
release:
	@.ci/release

clean:
	rm -rf .venv site build dist *.egg-info .hypothesis .mypy_cache .ruff_cache .pytest_cache tests/.pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
