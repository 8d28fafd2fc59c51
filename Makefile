# On a fresh machine with Python 3.11 to 3.13, pip, venv and make: `make demo`, `make test`. Nothing else is set up first.
.DEFAULT_GOAL := demo
.PHONY: demo test lint types imports ci matrix bench clean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Test files that run at a time. Processes of their own on two workers keep two cores busy.
WORKERS ?= 2
# A real Secret Service on a private bus, for the tests of the CA's key; a compiler, for the stubs of NVML and AMD SMI;
# Prometheus, which judges the agent's page of metrics; Alertmanager, which gets notices.
TEST_PACKAGES := gnome-keyring dbus gcc libc6-dev prometheus prometheus-alertmanager

demo: .venv/ready
	@$(BIN)/gridctl demo $(ARGS)

test: .venv/ready .venv/test-packages
	$(BIN)/python -m pytest -q -m "not matrix" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

matrix: .venv/ready
	$(BIN)/python -m pytest -q -m matrix $(ARGS)

bench: .venv/ready
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

imports: .venv/ready
	$(BIN)/lint-imports

ci:
	bash .ci/run

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build

# Made anew whenever what is to be installed has changed; otherwise a re-run costs nothing.
.venv/ready: pyproject.toml agent/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; make PYTHON=/path/to/python names one" >&2; exit 1; }
	@echo "installing into .venv: the first time takes a few minutes" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e './agent[torch,nvml]' -e '.[demo,dev]'
	@touch $@

# Tests whose packages are missing skip themselves and say so.
.venv/test-packages: .venv/ready
	@if command -v dpkg >/dev/null && dpkg -s $(TEST_PACKAGES) >/dev/null 2>&1; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] \
		&& { apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(TEST_PACKAGES) >/dev/null; }; then :; \
	else echo "left out: the tests with a real Secret Service, stubs of NVML and AMD SMI, Prometheus or Alertmanager. To run them: apt-get install $(TEST_PACKAGES), as root" >&2; fi
	@touch $@
