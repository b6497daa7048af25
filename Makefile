# The two commands of the README, and what CI runs. Everything is set up in .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.7

unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve page test test-all test-kube steady coverage mutate bench chaos soak fuzz check format pictures lock clean

$(VENV)/.ready: requirements-dev.lock pyproject.toml
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --require-hashes -r requirements-dev.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	$(BIN)/steppe warm
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/steppe train CartPole-v1 --algo ppo --runtime processes --mode async --actors 2 --target-return 475

serve: page
	$(BIN)/steppe serve

# What the page needs from the npm registry that this machine is set up for; nothing to do where it is there.
page: $(VENV)/.ready
	$(BIN)/python scripts/fetch_page_parts.py

# Tests wait for other processes half of their time, so there are two workers a core, as far as memory goes (1.5 GiB each).
WORKERS ?= $(shell $(PYTHON) -c "import os; print(max(2, min(2 * len(os.sched_getaffinity(0)), \
	os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') * 2 // (3 << 30))))")
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 10

# What a contributor runs before every commit; PACKAGE=replay runs the tests of one package.
test: $(VENV)/.ready
	$(BIN)/python scripts/fetch_page_parts.py --tests
	$(PYTEST) $(if $(PACKAGE),tests/$(PACKAGE))

# Everything but the tests on a Kubernetes control plane.
test-all: $(VENV)/.ready
	$(BIN)/python scripts/fetch_page_parts.py --tests
	$(PYTEST) -m ""

# Repeats a suite while busy processes compete for the cores: make steady RUNS=3 TARGET=test BUSY=2
steady: $(VENV)/.ready
	$(BIN)/python scripts/steady.py --runs $(or $(RUNS),3) --target $(or $(TARGET),test) --busy $(or $(BUSY),2)

# Branch coverage of test-all, with the roles' processes, and of compiled kernels with compilation off.
coverage: $(VENV)/.ready
	$(BIN)/python scripts/measure_coverage.py

# On a real Kubernetes control plane, which is built once.
test-kube: $(VENV)/.ready
	STEPPE_KUBE=$$(scripts/build-kube) && export STEPPE_KUBE && $(BIN)/python -m pytest tests/kube

bench: $(VENV)/.ready
	$(BIN)/steppe bench --all

bench-%: $(VENV)/.ready
	$(BIN)/steppe bench $*

chaos: $(VENV)/.ready
	$(BIN)/python benchmarks/chaos.py kills
	KILLS=$(or $(KILLS),100) $(BIN)/python -m pytest -m "" tests/chaos/test_kafka_chaos.py
	KILLS=2 $(BIN)/python -m pytest -m "" tests/chaos/test_kills.py

soak: $(VENV)/.ready
	$(BIN)/python benchmarks/chaos.py soak

fuzz: $(VENV)/.ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python atheris==3.0.0
	$(BIN)/python scripts/fuzz_codec.py -max_total_time=$(or $(SECONDS_EACH),300)
	FUZZ=$(or $(FUZZ),1000000) $(BIN)/python -m pytest -m slow tests/chaos/test_kafka_fuzz.py

mutate: $(VENV)/.ready
	$(BIN)/python scripts/mutate.py --report docs/mutation.md

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pictures: $(VENV)/.ready
	$(BIN)/python scripts/draw_pictures.py
	$(BIN)/python scripts/fetch_page_parts.py --tests
	$(BIN)/python scripts/draw_page.py

lock:
	uv pip compile pyproject.toml --all-extras --generate-hashes --python-version 3.11 -q -o requirements.lock
	uv pip compile pyproject.toml --all-extras --group dev -c requirements.lock --generate-hashes --python-version 3.11 -q -o requirements-dev.lock

clean:
	rm -rf $(VENV) benchmarks/.venvs .pytest_cache .mypy_cache .ruff_cache build dist
