# Everything needs Python >= 3.11 and nothing else:
#   make demo     environment, install, the sample study segmented; says where to look
#   make test     the whole suite, lint, types, floors
#   make test-thorough   further cases of the same checks; CI runs both
#   make test-lowest   the unit tests with the lowest versions that pyproject.toml allows
#   make test-python   the suite with another Python (OTHER_PYTHON=python3.12) and torch 2.11
#   make bench    what loading, the way back and a small scan take here; some 3 minutes, no peers
#   make bench-smoke   every script of benchmarks/ in its smallest form
#   make gpu-trial   the commands that measure a GPU, in small and without one; TRIAL_PYTHON is tried
#   make fuzz     each header reader fuzzed for 10 minutes (SECONDS=600); its corpus is kept
#   make docs     the documentation site, in build/site; open build/site/index.html
#   make offline  wheels, SBOM and image recipe for a machine without internet, in build/offline
#   make constraints   constraints.txt anew, from a fresh environment with the newest versions
PYTHON ?= python3
VENV ?= .venv
DEMO_OUT ?= demo-out
JOBS ?= 2
SECONDS ?= 600

BIN := $(VENV)/bin
# Each worker takes contiguous tests, so that the fixtures of most modules are built only once.
# A test that waits for ever is named after ten minutes.
PARALLEL := -n $(JOBS) --dist worksteal --timeout 600
# Else each worker rewrites all tests anew, and each process of a test compiles the package
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo install lint types floors unit test test-slow test-reference test-gpu bench fuzz docs constraints wheel clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

# A stamp file stands for each finished step, so that a second `make` has nothing to do.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "scanloom needs Python 3.11 or later: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	    { echo "No venv: on Debian or Ubuntu, apt install python3-venv"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing scanloom into $(VENV) ..."
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test,train]'
	@touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/scanloom demo --out $(DEMO_OUT)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/oxlint --deny-warnings pipeline/scanloom/review
	$(BIN)/oxfmt --check pipeline/scanloom/review

types: $(VENV)/.installed-test
	$(BIN)/mypy

floors: $(VENV)/.installed-test
	$(BIN)/lint-imports

unit: $(VENV)/.installed-test
	$(BIN)/pytest $(PARALLEL)

test: lint types floors unit

# The GPU's tests run on a stand-in too, which a CPU calculates: one for each path of the code.
ON_STAND_IN := LPS-0.0 or too_small or flips or half_that_overflows

.PHONY: test-thorough
test-thorough: $(VENV)/.installed-test
	$(BIN)/pytest $(PARALLEL) -m 'thorough and not gpu and not reference'
	SCANLOOM_STAND_IN=1 $(BIN)/pytest $(PARALLEL) -m gpu -k "$(ON_STAND_IN)" tests/gpu

# uv solves for the lowest versions, which pip can't. torch stays at the CPU build of constraints.txt:
# its lowest version brings gigabytes of CUDA libraries.
.PHONY: test-lowest test-python
UV := build/uv/bin/uv
OTHER_PYTHON ?= python3.12

$(UV):
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet --upgrade pip uv

build/lowest/.installed: $(UV) pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear build/lowest
	build/lowest/bin/python -m pip install --quiet $$(grep ^torch== constraints.txt)
	$(UV) pip install --quiet --python build/lowest/bin/python --resolution lowest-direct \
	    $$(grep ^torch== constraints.txt) --editable '.[test,train]'
	@touch $@

# Old libraries warn of each other: warnings are no errors here.
test-lowest: build/lowest/.installed
	build/lowest/bin/python -m pytest $(PARALLEL) -W default tests/unit

build/other-python/.installed: $(UV) pyproject.toml
	$(UV) venv --quiet --clear --python $(OTHER_PYTHON) build/other-python
	$(UV) pip install --quiet --python build/other-python/bin/python 'torch==2.11.*' --editable '.[test,train]'
	@touch $@

test-python: build/other-python/.installed
	build/other-python/bin/python -m pytest $(PARALLEL) tests/unit tests/integration tests/fake_gpu

test-slow: $(VENV)/.installed-test
	$(BIN)/pytest $(PARALLEL) -m 'slow and not gpu and not reference'

test-reference: $(VENV)/.installed-test
	$(BIN)/pytest $(PARALLEL) -m 'reference and not gpu'

test-gpu: $(VENV)/.installed-test
	$(BIN)/pytest -m gpu

bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/load.py --rounds 3
	$(BIN)/python benchmarks/restore.py --peers torch
	$(BIN)/python benchmarks/one_scan.py --slices 60 --runs 2 --peers

.PHONY: bench-smoke
bench-smoke: $(VENV)/.installed-test
	$(BIN)/pytest $(PARALLEL) -m slow tests/unit/test_benchmark_scripts.py

# As on a machine that has PyTorch and little else: what is missing comes as wheels.
.PHONY: gpu-trial
TRIAL_PYTHON ?= $(BIN)/python
gpu-trial: $(VENV)/.installed-test
	PYTHON=$(BIN)/python benchmarks/gpu_queue.sh gather build/gpu-wheels \
	    $$($(TRIAL_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	for command in tests measure; do TRIAL=1 PYTHON=$(TRIAL_PYTHON) WHEELS=build/gpu-wheels \
	    OUT=build/gpu-trial benchmarks/gpu_queue.sh $$command || exit 1; done

$(VENV)/.installed-fuzz: $(VENV)/.installed-test
	$(PIP) install --quiet --constraint constraints.txt --editable '.[fuzz]'
	@touch $@

fuzz: $(VENV)/.installed-fuzz
	PYTHONPATH=tests $(BIN)/python -m fuzz.corpus $(SECONDS)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The site: build/site/index.html"

# torch is held back to the version that the bfloat16 kernels were validated with. CUDA's own
# packages follow from torch, and differ between machines: they are not pinned.
HELD_BACK ?= torch==2.13.0
FRESH := build/constraints

constraints:
	rm -rf $(FRESH)
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet --upgrade pip
	$(FRESH)/bin/python -m pip install --quiet '.[test,train,docs,fuzz]' $(HELD_BACK)
	{ echo "# The versions that scanloom is tested with: pip install -c constraints.txt scanloom"; \
	  echo "# Written by make constraints. Bounds are in pyproject.toml."; \
	  $(FRESH)/bin/python -m pip --disable-pip-version-check freeze --all --exclude scanloom \
	      --exclude pip --exclude wheel | sed 's/+[a-z0-9]*$$//' | \
	      awk -F== '{ gsub("_", "-", $$1); print tolower($$1) "==" $$2 }' | \
	      grep -v -E '^(cuda|nvidia-[cn]|triton)' | LC_ALL=C sort; } > $(FRESH)/constraints.txt
	cp $(FRESH)/constraints.txt constraints.txt
	rm -rf $(FRESH)

# EXTRAS and TORCH_INDEX: see deploy/offline.sh
.PHONY: offline
offline:
	PYTHON=$(PYTHON) deploy/offline.sh build/offline

wheel: $(VENV)/.installed-test
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

clean:
	rm -rf build dist $(DEMO_OUT) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find pipeline tests -name __pycache__ -type d -prune -exec rm -rf {} +
