# Every target starts from nothing: it creates .venv, and renews it when a file that decides its contents has changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench
# The package is the repository root, so a type checker finds it under its name only through a link.
TYPECHECK := .venv/typecheck

.DEFAULT_GOAL := help
.PHONY: help demo test full quick lint types docs bench clean
# The checks print one after another also under `make -j`.
.NOTPARALLEL:

help:
	@echo "make demo    train the example on two local processes (examples/train_ddp.py)"
	@echo "make test    the whole check: lint, types, docs, tests"
	@echo "make full    the same and the tests that take long: benchmarks, soaks, more processes"
	@echo "make quick   lint, types and the fast tests: every loss and public verb, on several processes too"
	@echo "make lint    ruff check, ruff format --check"
	@echo "make types   mypy"
	@echo "make docs    build the documentation into site/ (site/index.html), strictly and without the network"
	@echo "make bench   run every script in benchmarks/, one after another"
	@echo "make clean   remove .venv, site, build products and caches"
	@echo "PYTHON=...   the interpreter .venv is made with (default: python3)"

$(STAMP): setup.cfg constraints.txt pyproject.toml
	@echo "installing into .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test,demo,integrations,docs]"
	@mkdir -p $(TYPECHECK)
	@ln -sfn ../.. $(TYPECHECK)/fullrank
	@touch $@

# The peers of the benchmarks, for `make bench` alone.
$(BENCH_STAMP): $(STAMP)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test,bench]"
	@touch $@

# One thread per process: the processes share the cores, and torchrun warns when the number is not set.
demo: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_ddp.py

# Lint, types and documentation are jobs next to those of the tests.
test: $(STAMP)
	@$(BIN)/python tests/run.py --checks

full: $(STAMP)
	@$(BIN)/python tests/run.py --checks --full

quick: $(STAMP)
	@$(BIN)/python tests/run.py --checks --quick

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

clean:
	rm -rf .venv site build dist *.egg-info .hypothesis .mypy_cache .ruff_cache .pytest_cache tests/.pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
