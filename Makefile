# make demo   see the whole thing work            make test       everything that must pass
# make bench  measure generation on this CPU      make test-slow  the full matrices
# make lint   ruff and mypy                       make clean      remove what make made
#
# Another interpreter: make PYTHON=python3.12 test (3.11 or newer, for the pinned set).

PYTHON ?= python3
VENV := .venv
NEWEST := .venv-newest
NEWEST_TRANSFORMERS := 5.24.0

# One thread: the sizes here are far too small to share, and the bits must not depend on the machine's cores.
RUN := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/
RUN_NEWEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(NEWEST)/bin/
INSTALL := -m pip -qq --disable-pip-version-check --no-input install
TEST_TOOLS := hypothesis numpy pytest pytest-timeout

.PHONY: help demo test test-slow lint bench clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.installed-hf
	@$(RUN)python -m replayssm generate tiny-mamba2 --compare --max-new-tokens 128
	@echo
	@$(RUN)python -m replayssm generate tiny-gdn-hybrid --compare --max-new-tokens 128

test: lint $(NEWEST)/.installed
	@echo "== tests (transformers of constraints.txt)"
	@$(RUN)python -m pytest -q -m "not slow"
	@echo "== the Hugging Face tests once more, under transformers $(NEWEST_TRANSFORMERS)"
	@$(RUN_NEWEST)python -m pytest -q -m "not slow" tests/hf

test-slow: $(VENV)/.installed-dev
	@$(RUN)python -m pytest -q --timeout 3600

lint: $(VENV)/.installed-dev
	@echo "== ruff, mypy"
	@$(VENV)/bin/ruff check -q .
	@$(VENV)/bin/ruff format -q --check .
	@$(VENV)/bin/mypy --no-error-summary

bench: $(VENV)/.installed-dev
	@$(RUN)python benchmarks/generation.py
	@$(RUN)python benchmarks/memory.py
	@$(RUN)python benchmarks/plot.py

clean:
	rm -rf $(VENV) $(NEWEST) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is younger than what it was made from: a second `make` installs nothing.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: the pinned set needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-hf: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing replayssm[hf] into $(VENV) (torch is large: about a minute)"
	@$(VENV)/bin/python $(INSTALL) -c constraints.txt -e '.[hf]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing replayssm[dev] into $(VENV) (about a minute)"
	@$(VENV)/bin/python $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed-hf

$(NEWEST)/.installed: pyproject.toml constraints.txt Makefile $(VENV)/.installed-dev
	@echo "== installing replayssm with transformers $(NEWEST_TRANSFORMERS) into $(NEWEST) (about a minute)"
	@test -x $(NEWEST)/bin/python || $(VENV)/bin/python -m venv $(NEWEST)
	@sed 's/^transformers==.*/transformers==$(NEWEST_TRANSFORMERS)/' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST)/bin/python $(INSTALL) -c $(NEWEST)/constraints.txt -e '.[hf]' $(TEST_TOOLS)
	@touch $@
