# make demo     make the environment, then fine-tune, evaluate and predict on this machine's own data
# make check    lint, types and the fast tests, for while you work
# make test     lint, types and every test: under 15 minutes on 2 cores, before a change lands
# make test-versions  the fast tests with the oldest and the newest supported versions, in their own
#               environments: when a day's work is done, and before a version range changes
# make install  make the environment with every extra; the others do it first
# make docs     build the documentation into site/; a warning is an error

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled

# Packages are installed uncompiled (below). If Python may not keep what it compiles, every process
# compiles about 2,500 files again, and `make test` takes 16 instead of 13 minutes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo check test test-versions lint types fast-tests tests docs format bench clean

install: $(INSTALLED)

# Built again only when its inputs change: afterwards nothing here needs a network.
# --no-compile: Python compiles the files that it imports; pip would compile all 18,000.
# The pip that comes with Python 3.11 takes half a minute longer; it is enough if there is no other.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("rapidformer needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check pip==26.3
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev,peers]'
	touch $@

demo: install
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/demo/run.py

# mypy uses one core, and tests often wait for processes: side by side they take less time.
check: lint
	$(MAKE) --jobs 2 types fast-tests

test: lint
	$(MAKE) --jobs 2 types tests

# Each of these has a constraints-NAME.txt; constraints.txt, with torch between them, is `make test`.
VERSIONS := oldest newest
# PyPI's torch for Linux brings gigabytes of CUDA libraries, which these tests do not use:
# TORCH_INDEX=https://download.pytorch.org/whl/cpu has builds without them.
TORCH_INDEX ?=

.venv-%/.installed: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-compile --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --constraint constraints-$*.txt --editable '.[all,dev]'
	touch $@

.PRECIOUS: .venv-%/.installed

# One after the other, and all of them even if one fails. What cannot be installed is said, not hidden.
test-versions:
	@status=0; for name in $(VERSIONS); do \
	    if ! $(MAKE) --no-print-directory .venv-$$name/.installed; then \
	        echo "$$name: NOT TESTED, constraints-$$name.txt cannot be installed here"; status=1; continue; \
	    fi; \
	    .venv-$$name/bin/python -c 'import torch, transformers as t; print("torch", torch.__version__, "transformers", t.__version__)'; \
	    .venv-$$name/bin/python -m pytest --numprocesses 2 --dist worksteal -m "not slow" || status=1; \
	done; exit $$status

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Which tests are slow is said in tests/conftest.py, and by a mark on some files and tests.
fast-tests: install
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

tests: install $(COMPILED)
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# In a new environment nothing is compiled yet, and three workers that start together compile the
# same 6,000 files: 129 s of processor time instead of 95. What goes wrong here, the tests say again.
$(COMPILED): $(INSTALLED)
	-$(BIN)/python -m pytest --collect-only > /dev/null
	touch $@

docs: install
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/parallel_overhead.py
	$(BIN)/python benchmarks/memory_per_rank.py
	$(BIN)/python benchmarks/preprocess_rate.py
	$(BIN)/python benchmarks/index_maps.py
	$(BIN)/python benchmarks/loader_rate.py

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest site demo-output .mypy_cache .ruff_cache .pytest_cache
