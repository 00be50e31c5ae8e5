# A fresh machine needs Python 3.11 or newer with pip, and nothing else. On Python 3.10: make CONSTRAINTS=/dev/null ...
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints-dev.txt

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := lance_ray_stream tests examples $(wildcard benchmarks)

.DEFAULT_GOAL := help
.PHONY: help setup train test soak lint format docs bench clean

help:
	@echo "make train   train a small network from a LanceDB table: stopped in mid-epoch, resumed on more workers"
	@echo "make test    lint, types and tests"
	@echo "make soak    an elastic run in which nodes come and go and processes are killed, about 10 minutes"
	@echo "make lint    lint and types"
	@echo "make format  format the code"
	@echo "make docs    build the documentation into site/"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove what was built, the virtual environment included"

setup: $(INSTALLED)

# The file is the stamp of a finished installation: nothing is done twice.
$(INSTALLED): pyproject.toml $(wildcard $(CONSTRAINTS))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=23.1"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev,docs]"
	touch $@

train: setup
	$(BIN)/python examples/train_digits.py

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# Other courses: make soak SOAK="--seed 7 --even"
soak: setup
	$(BIN)/python -m tests.soak $(SOAK)

format: setup
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Needs no network; a warning, such as a dead link, is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .data site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
