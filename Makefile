# Everything a user or developer of Stele runs. `make help` lists it.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
SEEDS  ?= 1000
ROUNDS ?= 20
MINUTES ?= 60
JOBS   ?= 4

DOCKER ?= docker
TAG    ?= dev

.PHONY: help venv s3-server venv-demo demo docs images jar jar-if-possible hdfs e2e test lint types unit sim chaos linear compiled mutants power fuzz bench generate clean

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp per set of extras: installed again only when pyproject.toml changes.
$(VENV)/.base:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stele needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml tools/stele_local/pyproject.toml constraints.txt
	@echo "installing Stele with Spark and Java into $(VENV): some minutes, and about 1 GB"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo]' -e ./tools/stele_local
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml tools/stele_local/pyproject.toml constraints.txt
	@echo "installing Stele and what developers need into $(VENV): some minutes, 1.3 GB"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]' -e ./tools/stele_local
	@touch $@ $(VENV)/.demo

# A server of S3 for tests of backups, in an environment of its own: it and the kubernetes package want other versions of one library.
$(VENV)/.s3: $(VENV)/.dev tests/backup/s3-requirements.txt
	$(PYTHON) -m venv $(VENV)/s3
	$(VENV)/s3/bin/python -m pip install -q -r tests/backup/s3-requirements.txt
	@touch $@

s3-server: $(VENV)/.s3 ## the server of S3 that tests of backups use

$(VENV)/hdfs: tests/backup/hdfs/pom.xml | venv
	mvn -q -f $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$@
	@touch $@

hdfs: $(VENV)/hdfs ## backups on a real HDFS, whose jars are fetched (90 MB); needs Maven and Java 17
	$(BIN)/python -m pytest tests/backup/test_hdfs.py

venv: $(VENV)/.dev ## the virtual environment with all that developers need
venv-demo: $(VENV)/.demo

demo: venv-demo $(if $(KUBE),images) ## the product doing its job on real data; KEEP=1 leaves it running, KUBE=1: in your Kubernetes
	STELE_DOCKER="$(DOCKER)" STELE_TAG=$(TAG) $(BIN)/python -m examples.demo $(if $(KEEP),--keep) $(if $(KUBE),--kube)

docs: venv ## the site, into build/site; a link that leads nowhere fails
	$(BIN)/python docs/tools/picture.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

images: jar-if-possible ## the images node, operator, tools and spark; DOCKER=docker TAG=dev BUILD_FLAGS=
	for target in node operator tools spark; do \
	  $(DOCKER) build --quiet $(BUILD_FLAGS) --target $$target --tag stele/$$target:$(TAG) . || exit 1; done
	@$(DOCKER) images --filter 'reference=stele/*:$(TAG)' --format '{{.Repository}}:{{.Tag}}  {{.Size}}'

JAR = pipeline/stele_spark/jars/stele-spark.jar

jar: $(JAR) ## the JVM reader and catalog for Spark (docs/spark.md); needs Maven and Java 17

jar-if-possible: # where they are missing it says so and goes on
	@if $(PYTHON) pipeline/jvm/build.py --check; then $(MAKE) --no-print-directory $(JAR) IF_POSSIBLE=--if-possible; fi

$(JAR): pipeline/jvm/pom.xml pipeline/jvm/build.py $(shell find pipeline/jvm/src -type f) | venv
	$(BIN)/python pipeline/jvm/build.py $@ $(IF_POSSIBLE)

e2e: venv images ## end to end in your Kubernetes: docs/kubernetes.md has the settings; TESTS=test_3_machine for a part
	STELE_E2E=1 STELE_DOCKER="$(DOCKER)" STELE_TAG=$(TAG) $(BIN)/python -m pytest -p no:cacheprovider -v \
	  $(if $(TESTS),$(addprefix tests/e2e/,$(addsuffix .py,$(TESTS))),tests/e2e)

test: lint ## what CI runs: style, types, imports, every test, a bounded share of simulation, chaos, linear, power and mutants; JOBS at once
	$(MAKE) --no-print-directory -j 2 types unit  # types are checked beside what tests need first

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: venv
	MYPYPATH=node:operator:pipeline:tools/stele_local:. $(BIN)/mypy -p stele -p stele_operator -p stele_local -p stele_spark -p examples

# Hundreds of processes are started: without bytecode each would compile all of Stele anew. More at once than there are
# processors, since tests mostly wait. Files are run in the order of tests/conftest.py.
unit: export PYTHONDONTWRITEBYTECODE =
unit: venv s3-server jar-if-possible build/spark.jsa
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=25 \
	  --ignore=tests/backup/test_s3.py --ignore=tests/backup/test_hdfs.py --ignore=tests/rpc/test_inflow_memory.py
	$(BIN)/python -m pytest tests/rpc/test_inflow_memory.py  # alone: it measures memory
	$(BIN)/python -m pytest tests/backup/test_s3.py  # alone: the client of S3 leaves native threads behind

build/spark.jsa: tests/spark/archive.py constraints.txt | venv jar-if-possible # what the Javas of tests load, half as long to start
	$(BIN)/python -m tests.spark.archive $@

sim: venv ## simulated nodes that run production's code, and simulated clusters under a driver; SEEDS=10000 for more, SEED=n for one story, SHRINK=1 with it
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED) $(if $(SHRINK),--shrink),--seeds $(SEEDS) --jobs $(JOBS))
	$(if $(SEED),,$(BIN)/python -m tests.sim --planted --seeds 20)
	$(if $(SEED),,$(BIN)/python -m tests.sim --coverage --seeds 20)
	$(if $(SEED),,$(BIN)/python -m tests.driver.moves_world $(SEEDS))
	$(if $(SEED),,STELE_LEADER_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q tests/driver/test_leader_simulation.py tests/driver/test_leader_balance.py)

chaos: venv ## real processes killed at random moments; ROUNDS=20, SEED=n to repeat a run
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

linear: venv ## what clients are told under faults, judged for linearizability; ROUNDS=20, SEED=n to repeat a run
	$(BIN)/python -m tests.linear --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

compiled: venv ## the compiled build (docs/compiled.md), and rounds of linear and chaos on it; ROUNDS=20; needs a C compiler
	$(BIN)/python tools/compile.py build/compiled
	PYTHONPATH=build/compiled $(BIN)/python -m pytest -q tests/raft tests/rpc/test_peers.py tests/tserver/test_leases.py
	PYTHONPATH=build/compiled $(BIN)/python -m tests.linear --rounds $(ROUNDS)
	PYTHONPATH=build/compiled $(BIN)/python -m tests.chaos --rounds $(ROUNDS)

mutants: venv jar-if-possible ## plant each fault of a kept list in a copy of the tree and name the test that sees it; MUTANTS=3,17 for some
	$(BIN)/python -m tests.mutants --jobs $(JOBS) $(if $(MUTANTS),--only $(MUTANTS))

power: venv ## what real nodes wrote, cut off at any file call (root, /dev/fuse); ROUNDS=20, SEED=n
	$(BIN)/python -m tests.power --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

fuzz: venv ## hostile input for every parser and port; MINUTES=60, SEED=n to repeat a run's inputs
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench: venv ## throughput, latency, fail-over, copy, scan, memory; beside etcd and Kudu where they are at hand
	$(BIN)/python -m bench

generate: venv ## the CRDs and the protobuf code, from their sources
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python node/stele/rpc/proto/regenerate.py
	$(BIN)/python -m stele_operator.api.generate

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
