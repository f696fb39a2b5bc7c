# `make help` lists the targets. PYTHON picks the interpreter of a new .venv; ARGS goes to the command.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-fast test-hosts coverage soak simulate compliance matrix bench \
  docs lint imports format typecheck package clean distclean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

install: $(STAMP) ## Create .venv with all that is needed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
	  { echo 'Python 3.10 to 3.13 is needed: make install PYTHON=python3.11' >&2; exit 1; }
# Some systems ship venv without ensurepip, or no venv at all.
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --without-pip $(VENV) || \
	  $(PYTHON) -m virtualenv $(VENV)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip || \
	  $(PYTHON) -m pip --python $(PY) install pip || \
	  { echo 'No pip for .venv: install your system'\''s python3-venv package' >&2; exit 1; }
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
# Else each new process compiles the package again where PYTHONDONTWRITEBYTECODE is set.
	$(PY) -m compileall -q rayrpc
	@touch $@

demo: install ## Train CartPole on a few workers
	$(VENV)/bin/rayrpc run examples/cartpole.py $(ARGS)

# Else every process of the tests, some hundreds, compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(strip $(ARGS)),)
test: lint ## Check all, and run the tests that CI runs; with ARGS, run those tests alone
	$(PY) tests/gate.py
else
test: install
	$(PY) -m pytest $(ARGS)
endif

test-all: lint ## Check all, run all tests, the slow ones too, and measure coverage, which has a floor
	$(PY) tests/gate.py --all $(ARGS)
	$(if $(strip $(ARGS)),,$(MAKE) --no-print-directory coverage)

test-hosts: install ## Cut cables and kill Ray's processes on hosts made of network namespaces; needs root
	TESTS_ALL=1 $(PY) -m pytest tests/hosts $(ARGS)

coverage: install ## Run the tests of CI, and report the lines and branches that none reaches
	$(PY) -m coverage erase
	$(PY) -m coverage run tests/gate.py $(ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report $(if $(strip $(ARGS)),--fail-under=0)

test-fast: install ## Run the unit tests, which need neither Ray nor processes
	$(PY) -m pytest -m "unit and not slow" $(ARGS)

soak: install ## Call three workers in all ways for 10 minutes: no call is lost, and nothing grows
	$(PY) tests/soak.py $(ARGS)

simulate: install ## Run the threads in SEEDS orders (1000) of each scenario; ARGS names some
	$(PY) tests/simulation/simulate.py $(ARGS) $(if $(SEEDS),--seeds $(SEEDS))

compliance: install ## Run PyTorch's own RPC suites, all lists, and compare outcomes with torch's own RPC
	$(PY) tests/compliance/run.py --tests tests/compliance/core.txt $(ARGS)
	$(PY) tests/compliance/run.py --tests tests/compliance/autograd.txt $(ARGS)
	$(PY) tests/compliance/run.py --tests tests/compliance/torchscript.txt $(ARGS)
	$(PY) tests/compliance/run.py --tests tests/compliance/profiler.txt $(ARGS)
	$(PY) tests/differential/compare.py

matrix: install ## Run the main tests with the oldest and the newest versions that are supported
	$(PY) -m nox $(ARGS)

bench: install ## Time calls, whole programs, and training
	$(PY) tests/benchmarks/bench_rpc.py --output build/bench $(ARGS)
	$(PY) tests/benchmarks/bench_programs.py --output build/bench $(ARGS)
	$(PY) tests/benchmarks/bench_training.py --output build/bench $(ARGS)

docs: install ## Build the site into build/docs, the tutorials executed; ARGS go to Sphinx
	DOCS_EXECUTE=1 $(PY) -m sphinx -W --keep-going -b html $(ARGS) docs build/docs/html

package: install ## Build the wheel and the sdist into dist/, and check what is in them
	rm -rf dist
	$(PY) -m build
	$(PY) -m twine check --strict dist/*

lint: install ## Check style, format, imports and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(MAKE) --no-print-directory imports typecheck

imports: install ## Check the layers of imports
	$(VENV)/bin/lint-imports

format: install ## Format the code and mend what ruff can
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

typecheck: install ## Check the types
	$(PY) -m mypy

clean: ## Remove build outputs and caches
	rm -rf build dist docs/reference/commands.md docs/tutorials/*.ipynb *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis examples/output
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## ... and .venv
	rm -rf $(VENV)
