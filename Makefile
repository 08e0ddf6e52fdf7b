# Two commands are enough on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint bench wheel clean

demo: $(STAMP)  ## EMO against MLE on a small model and real text; results in demo-output/
	$(BIN)/python examples/emo_demo.py

test: $(STAMP)  ## everything that is not slow and needs no GPU
	$(BIN)/python -m pytest

test-all: $(STAMP)  ## the slow ones too
	$(BIN)/python -m pytest -m "not gpu"

lint: $(STAMP)  ## formatting, types, and the floors of the layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## ratios against peers measured in the same run, and how they scale; about 25 minutes on 2 cores
	$(BIN)/python -m benchmarks

wheel: $(STAMP)
	$(BIN)/python -m build

# constraints.txt pins torch and the other packages: everybody tests the same versions.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
