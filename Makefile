# make demo     make the environment, then fine-tune, evaluate and predict on this machine's own data
# make check    lint, types and the fast tests: under 2 minutes on 2 cores, for while you work
# make test     lint, types and every test: under 15 minutes on 2 cores, before a change lands
# make test-oldest  the fast tests with the oldest supported versions, in their own environment
# make install  make the environment with every extra; the others do it first
# make docs     build the documentation into site/; a warning is an error

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Packages are installed uncompiled (below). If Python may not keep what it compiles, every process
# compiles about 2,500 files again, and `make test` takes 16 instead of 13 minutes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo check test test-oldest lint types fast-tests tests docs format bench clean

install: $(INSTALLED)

# Built again only when its inputs change: afterwards nothing here needs a network.
# --no-compile: Python compiles the files that it imports; pip would compile all 18,000.
# The pip that comes with Python 3.11 takes half a minute longer; it is enough if there is no other.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("rapidformer needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check pip==26.3
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	touch $@

demo: install
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/demo/run.py

# mypy uses one core, and tests often wait for processes: side by side they take less time.
check: lint
	$(MAKE) --jobs 2 types fast-tests

test: lint
	$(MAKE) --jobs 2 types tests

OLDEST := .venv-oldest

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints-oldest.txt --editable '.[all,dev]'
	touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Which tests are slow is said in tests/conftest.py, and by a mark on some files and tests.
fast-tests: install
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

tests: install
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

docs: install
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

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
	rm -rf $(VENV) $(OLDEST) site demo-output .mypy_cache .ruff_cache .pytest_cache
