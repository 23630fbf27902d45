# Each target works on a fresh machine that has make and Python 3.11 or newer: the first one that runs makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/demo
INSTALLED := $(VENV)/installed
OLDEST := $(CURDIR)/$(VENV)/oldest
# the tests start hundreds of processes, for which the bytecode of each module is to be there, whatever a machine says
export PYTHONDONTWRITEBYTECODE :=
# the tests' models are tiny: more threads than processes only wait for each other
export OMP_NUM_THREADS ?= 1
# on two cores one process more than cores: some tests wait
JOBS ?= 3

.PHONY: help demo test check test-slow test-oldest lint docs site bench clean

help: ## say what there is to make
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(DEMO) ## train a small network on real images, record it, replay it, show what it says
	$(BIN)/trace demo --overwrite

ifdef FILE
test: $(INSTALLED)
	$(BIN)/python -m pytest $(FILE)
else
test: lint ## everything that must hold: lint, types, tests, doctests; FILE=tests/messaging/test_bus.py only that
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
endif

check: lint ## the daily loop: lint, types, and the tests of the files that changed since the last commit
	$(BIN)/python tests/changed.py | xargs -r $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-slow: $(INSTALLED) ## what takes minutes: a hundred kills of each format, more damaged traces, random cases and models, the experiment
	$(BIN)/python -m pytest -n $(JOBS) -m slow
	TRACEREEL_EXAMPLES=all $(BIN)/python -m pytest -n $(JOBS) -m hypothesis
	TRACEREEL_FUZZ_CASES=1000 $(BIN)/python -m pytest -n $(JOBS) tests/trace/test_hostile.py -k random
	$(MAKE) test-oldest

test-oldest: $(INSTALLED) ## the tests of traces and commands, with the oldest versions that pyproject.toml allows
	$(BIN)/python -m pip install --quiet --no-compile --upgrade --target $(OLDEST) -r constraints-oldest.txt
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -n $(JOBS) tests/format tests/stores tests/upkeep \
	  tests/trace/test_writer_reader.py tests/trace/test_compression.py tests/trace/test_sample_traces.py \
	  tests/tracereel/test_cli.py tests/tracereel/test_cli_keeping.py tests/tracereel/test_cli_showing.py

lint: $(INSTALLED) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED) ## what is made of metrics and rules: docs/metrics.md, docs/rules.md, what `trace subscribers` says, the types of analyze.NAME
	$(BIN)/trace subscribers --markdown > docs/metrics.md.new
	mv docs/metrics.md.new docs/metrics.md
	$(BIN)/trace rules --markdown > docs/rules.md.new
	mv docs/rules.md.new docs/rules.md
	$(BIN)/python -c 'from analyze.catalogue import descriptions; print(descriptions(), end="")' > descriptions.new
	mv descriptions.new analyze/descriptions.json
	for package in tracer analyze; do \
	  $(BIN)/python -c "import $$package; from analyze.catalogue import stub; print(stub($$package), end='')" > stub.new; \
	  mv stub.new $$package/__init__.pyi; \
	done

# what it says about itself is no warning about these pages
site: $(INSTALLED) ## the documentation as pages with a search and a reference of the API, in site/: python3 -m http.server -d site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(INSTALLED) ## what recording and storing cost, measured in one run
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/hooks.py
	$(BIN)/python benchmarks/storage.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/batch.py
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/budget.py
	$(BIN)/python benchmarks/objects.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/dataset.py

clean: ## forget the environment and the caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build site *.egg-info

# torch by itself first: it is the one wheel of which a machine may have a build of its own
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer, not " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[demo]'
	touch $(DEMO)

$(INSTALLED): $(DEMO)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)
