# On a fresh machine run `make demo` or `make test`. Both set up .venv on first use.
PYTHON ?= python3
# The address of a package index with another build of torch, which is installed first: see docs/guide/start.md.
TORCH_INDEX ?=
# Options of `uv pip compile` and `uv pip install` in test-lowest and test-newest, such as --torch-backend cpu.
UV_OPTIONS ?=
# The tests that these two run, such as tests/otloss/solvers (all).
TESTS ?=
# Parts of the paths that `make mutants` changes, such as forecasts.
MODULES ?=
# What a release sets: the address of the public repository, where to report problems, and the day.
REPOSITORY ?=
CONTACT ?=
DATE ?=
# Where this is set, each process of the tests compiles all modules again, and each worker rewrites all asserts again.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
FOR_DEMO := $(VENV)/.installed-demo
FOR_DEV := $(VENV)/.installed-dev
OLD_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help demo docs look links gallery gallery-page test test-all test-bounds test-portable test-lowest test-newest mutants lint bench release clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=python3.12 (the Python that .venv is made with), TORCH_INDEX=URL (see docs/guide/start.md)"

demo: $(FOR_DEMO)  ## EMO against MLE on a small model and real text; results in demo-output/
	$(BIN)/python examples/emo_demo.py

gallery: $(FOR_DEV)  ## all examples, with their figures in gallery-output/; about 10 minutes on 2 cores
	$(BIN)/python examples/gallery.py

gallery-page: $(FOR_DEV)  ## the same, and the gallery of docs is updated by the examples that had their real data
	$(BIN)/python examples/gallery.py --docs

# Before the tests, since workers that need one kernel wait until one of them has compiled it. The four kernels of
# otloss_llm are left to the tests: a process of its own would take longer than the waits.
COMPILE := $(BIN)/python -m otloss.warm_up

test: $(FOR_DEV)  ## the tests that are not slow and need no GPU; about 5 minutes on 2 cores
	@echo "This takes about 5 minutes on 2 cores, 1 of them for the CPU kernels, the first time."
	@$(COMPILE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-all: $(FOR_DEV)  ## the slow tests too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not gpu" --hypothesis-profile many

# Kernels that check indices. They are compiled with fewer optimisations, which takes less time, and kept apart.
CHECKED := NUMBA_BOUNDSCHECK=1 NUMBA_OPT=1 NUMBA_LOOP_VECTORIZE=0 NUMBA_CACHE_DIR=$(CURDIR)/build/bounds

test-bounds: $(FOR_DEV)  ## the tests of kernels, and a sweep of sizes, with an error for each index beyond an array; about 10 minutes
	@export $(CHECKED) && $(COMPILE)
	OMP_NUM_THREADS=1 $(CHECKED) $(BIN)/python -m pytest -n auto $(wildcard tests/otloss/*/test_*kernel*.py) tests/otloss_llm/kernels

# The same numbers come out of other instructions and orders of summation, up to rounding.
test-portable: $(FOR_DEV)  ## tests/otloss three times, with other code paths of torch, MKL and numba, on one thread and on two
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE NUMBA_CPU_NAME=generic $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder tests/otloss
	OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder tests/otloss
	OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx512 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder tests/otloss

# Old libraries warn of their own old calls, and old transformers of file systems, so these warnings are not errors there.
test-lowest: build/tools  ## the tests with the lowest versions that pyproject.toml allows; some GB, in build/lowest
	$(call test_with,lowest,--resolution lowest-direct,$(addprefix -W default::,DeprecationWarning PendingDeprecationWarning FutureWarning) -W "default:mtime may not be reliable")

test-newest: build/tools  ## the tests with the newest versions of everything; some GB, in build/newest
	$(call test_with,newest,--resolution highest)

docs: $(FOR_DEV)  ## the site in build/site, offline; a warning or a broken link is an error
	@rm -rf docs/reference/generated docs/tutorials_built
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -q -W --keep-going docs build/site
	$(BIN)/python .ci/check_site.py build/site

look: docs  ## the site in a headless browser, with screenshots in build/pictures; needs the system's chromium and chromedriver
	$(BIN)/python -m pip install --quiet selenium
	$(BIN)/python .ci/look_at_site.py build/site --pictures build/pictures

links: $(FOR_DEV)  ## whether the pages that the site links to are there; needs a network
	$(BIN)/python -m sphinx -b linkcheck -q docs build/links

mutants: $(FOR_DEV)  ## a sample of small changes to MODULES (all), and which of them no test notices; about 40 minutes
	OMP_NUM_THREADS=1 $(BIN)/python .ci/mutants.py $(MODULES)

lint: $(FOR_DEV)  ## formatting, types, the order of the folders, and the lengths of pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/measure_pages.py --strict

bench: $(FOR_DEV)  ## ratios against peers measured in the same run, and how they scale; about an hour on 2 cores
	$(BIN)/python -m benchmarks

release: build/tools  ## sdist and wheel in dist/, checked, and tried in an empty environment
	build/tools/bin/python .ci/release.py --repository "$(REPOSITORY)" --contact "$(CONTACT)" --date "$(DATE)" --torch-index "$(TORCH_INDEX)"

clean:  ## remove .venv and builds
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	@$(PYTHON) -c '$(OLD_ENOUGH)' 2>/dev/null || { echo "otloss needs Python 3.11 or newer, got $(PYTHON):" \
		"$$($(PYTHON) --version 2>&1 | tail -1). Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# uv, build and twine, in an environment of their own.
build/tools:
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet uv build twine || { rm -rf $@; exit 1; }

# test_with NAME, OPTIONS OF uv, OPTIONS OF pytest: compiled kernels are kept apart from those of .venv.
define test_with
	build/tools/bin/uv pip compile --quiet pyproject.toml --extra test --python $(PYTHON) $(UV_OPTIONS) $(2) -o build/$(1).txt --upgrade
	build/tools/bin/uv venv --quiet --clear --python $(PYTHON) build/$(1)
	build/tools/bin/uv pip install --quiet --compile-bytecode --python build/$(1) $(UV_OPTIONS) --requirement build/$(1).txt
	build/tools/bin/uv pip install --quiet --python build/$(1) --no-deps --editable .
	OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=$(CURDIR)/build/$(1)/numba build/$(1)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(3) $(TESTS)
endef

# constraints.txt pins the versions of torch and the other packages. Only torch comes from TORCH_INDEX, without its
# dependencies, which that index may lack.
define install
	@$(BIN)/python -c '$(OLD_ENOUGH)' || { echo "otloss needs Python 3.11 or newer, $(VENV) has" \
		"$$($(BIN)/python --version 2>&1). Make a new one: make clean $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing the extra $(1) into $(VENV); the first time this takes some minutes."
	@$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --index-url $(TORCH_INDEX) torch)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(1)]"
endef

$(FOR_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,demo)
	@touch $@

# "dev" includes "demo".
$(FOR_DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,dev)
	@touch $(FOR_DEMO) $@
