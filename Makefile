# Every target makes and uses .venv; nothing is installed outside this directory (as root, three Debian packages may be, and
# one is unpacked into build/tools: see tools/prepare.sh).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	if $$p -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; \
	then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# CI runs the tests that need torch too; elsewhere they skip, because torch is large. WITH_TORCH=1 asks for it.
WITH_TORCH ?= $(if $(filter true,$(CI)),1,)
comma := ,
TEST_EXTRAS := daemon,ha,report,dev$(if $(WITH_TORCH),$(comma)torch$(comma)suites)
TEST_STAMP := $(VENV)/.stamp-test$(if $(WITH_TORCH),-torch)
PYTEST_ARGS ?=

.PHONY: help venv demo image docs test test-faults fuzz lint monitoring dashboards format protos bench evaluate clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@tools/prepare.sh venv "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)

# Two stamps: the demo does not wait for linters. An editable install: re-made only when pyproject.toml changes.
$(VENV)/.stamp-demo: pyproject.toml | $(BIN)/python
	$(PIP) install -q -e '.[daemon,report]'
	@touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/python
	$(PIP) install -q -e '.[$(TEST_EXTRAS)]'
	@touch $@ $(VENV)/.stamp-demo

venv: $(TEST_STAMP) ## Make .venv with everything that tests and linters need

demo: $(VENV)/.stamp-demo ## Plain TCP beside proxyd on an emulated WAN: build/demo.json, build/demo.png
	@tools/prepare.sh net
	@mkdir -p build
	$(BIN)/proxyd demo --out build/demo.json --plot build/demo.png

image: ## The container image, where no registry is reachable (root): build/image has it; with one: docker build .
	@tools/prepare.sh image
	tools/image.sh build proxyd

docs: $(TEST_STAMP) ## The documentation as a site in build/site; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

test: $(TEST_STAMP) ## All tests, as many at once as they bear (PYTEST_ARGS=... is passed on)
	@tools/prepare.sh tests
	$(BIN)/python -m tests $(PYTEST_ARGS)

test-faults: $(TEST_STAMP) ## The fault suite alone: every row of docs/reliability.md that a test holds
	@tools/prepare.sh tests
	$(BIN)/python -m pytest -m faults $(PYTEST_ARGS)

SECONDS ?= 60
fuzz: $(TEST_STAMP) ## Fuzz every parser, SECONDS=60 for all together; findings in build/fuzz
	$(BIN)/python -m tests.fuzz all --seconds $(SECONDS)

lint: $(TEST_STAMP) ## ruff, mypy --strict, layers, generated code in step with the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/protos.py --check

monitoring: $(TEST_STAMP) ## Alerts, their tests, scrape configuration and dashboards: promtool's verdict on deploy/
	@tools/prepare.sh monitoring
	$(BIN)/python tools/monitoring.py

dashboards: $(TEST_STAMP) ## Regenerate deploy/grafana/dashboards, and the alerts for Kubernetes
	$(BIN)/python tools/dashboards.py
	$(BIN)/python tools/monitoring.py --write

format: $(TEST_STAMP) ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(TEST_STAMP) ## Regenerate proxyd/v1 from protos/
	$(BIN)/python tools/protos.py

bench: $(VENV)/.stamp-demo ## Relay and grant benchmarks: build/relay.json, build/grants.json
	@mkdir -p build
	$(BIN)/proxyd bench relay --out build/relay.json
	$(BIN)/proxyd bench grants --out build/grants.json

evaluate: $(VENV)/.stamp-demo ## Simulated steps: tables and pictures of docs/ (QUICK=1: tiny ones, into build/; all else: tools/evaluate.py)
	$(BIN)/python tools/evaluate.py --part pipeline $(if $(QUICK),--quick)

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
