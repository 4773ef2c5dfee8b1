# Everything here sets itself up: `make demo` and `make test` need Python 3.11+ and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := .models/smollm2

.DEFAULT_GOAL := help
.PHONY: help install model demo up test check fmt lint types imports unit mesh e2e clients docs bench faults fuzz soak smoke clean

help:  ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml deploy/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint deploy/constraints.txt --editable '.[dev]'
	touch $@

install: $(INSTALLED)  ## Make the virtual environment

model: $(INSTALLED)  ## Fetch the default model, once
	$(BIN)/meshnet model get smollm2 --dir $(MODEL)

demo: model  ## Two shards and a head answer a question on this machine
	$(BIN)/python -m benchmarks.demo $(MODEL)

up: model  ## Start a local two-node cluster; Ctrl-C stops it
	$(BIN)/meshnet up --model $(MODEL)

test: check  ## All tests and checks, as CI runs them

check: lint types imports unit mesh e2e  ## Format, lint, types, import contracts and every test

fmt: $(INSTALLED)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet .

lint: $(INSTALLED)  ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)  ## pyright, strict
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(INSTALLED)  ## import-linter: who may import whom
	$(BIN)/lint-imports --no-cache

unit: $(INSTALLED)  ## Pure tests, with branch coverage
	$(BIN)/pytest tests/unit --cov --cov-report=term-missing:skip-covered --cov-fail-under=100

mesh: $(INSTALLED)  ## Real servers in one loop, tiny models
	$(BIN)/pytest tests/mesh

e2e: model  ## Real processes and the real model
	$(BIN)/pytest tests/e2e

clients: model  ## Real clients of other people, our OpenAPI document, lm_eval
	deploy/clients.sh

docs: $(INSTALLED)  ## Write docs/parameters.md from the tables
	$(BIN)/python -m benchmarks.parameters

bench: model  ## Re-make the numbers and plots of the README and docs/
	$(BIN)/python -m benchmarks.memory $(MODEL)
	$(BIN)/python -m benchmarks.growth $(MODEL)
	$(BIN)/python -m benchmarks.recovery $(MODEL)
	$(BIN)/python -m benchmarks.exact $(MODEL)
	$(BIN)/python -m benchmarks.bench $(MODEL) $(if $(MESHNET_BENCH_LLAMA),--llama $(MESHNET_BENCH_LLAMA))
	$(BIN)/python -m benchmarks.bench.tables

faults: model  ## Every fault at every moment on every hop, over real processes (an hour)
	$(BIN)/python -m benchmarks.faults $(MODEL)

fuzz: model  ## Five minutes of malformed requests to real shards
	$(BIN)/python -m benchmarks.fuzz $(MODEL)

soak: model  ## Half an hour of mixed traffic and random kills
	$(BIN)/python -m benchmarks.soak $(MODEL) --minutes 30 --standby

smoke: model  ## Build the images and try the composed cluster, where an engine can be started
	deploy/ci.sh

clean:  ## Remove what the targets made
	rm -rf $(VENV) .venv-clients .venv-instructor tests/clients/node/node_modules .models wheels build dist *.egg-info .pytest_cache .ruff_cache .coverage
