# Octavo's commands for a checkout. The environment is .venv; nothing outside this folder is written.
#   make install   create .venv          make demo [OUT=dir]   run the main job to its report
#   make test      pass the tests        make lint             ruff, mypy, import directions
#   make bench [RESUME=1]      run the benchmarks (1: those that this commit hasn't run yet)
#   make test-gpu [OUT=dir]    compare the backends on a GPU
#   make incidents [OUT=dir]   every drill on every layout, and healthy jobs: a table in dir
#   make faults [OUT=dir] [ROWS=a,b] [REPEAT=n]   a job on three hosts, a fault a row: a table in dir (root);
#                              RESUME=1 goes on with what an interrupted one has left
#   make audit                 known holes in the packages of constraints.txt, where an index tells
#   make deploy-hosts          what `octavo deploy` renders for Slurm and own hosts, run on hosts (root)

# Where Transformer Engine is: .venv after `pip install -e '.[te]'`, or an image's own Python.
GPU_PYTHON ?= .venv/bin/python
PYTHON ?= $(shell command -v python3.11 || command -v python3)
OUT ?= runs
BIN := .venv/bin
UNIT_PROCESSES = $(shell $(PYTHON) -c "import os; print(3 * os.cpu_count() // 2)")
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/installed

.PHONY: install demo test test-unit test-ranks test-clusters test-hosts test-gpu lint bench incidents faults deploy-hosts audit clean

install: $(STAMP)

# torch comes first and pinned: a looser request fetches gigabytes of CUDA. deepspeed is
# built from its sdist, which imports torch, so the build sees this environment.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and f"Octavo is tested on Python 3.11, this is {sys.version.split()[0]}: make install PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) install -q -c constraints.txt pip setuptools wheel
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt ninja numpy
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test]'
	touch $(STAMP)

demo: install
	$(BIN)/octavo run deploy/jobs/demo.yaml --out $(OUT)

# Tests within one process share the cores, three to two of them as some wait; so do two jobs' ranks
# and two Ray clusters, which wait for each other most of the time; hosts have the machine to
# themselves.
test: test-unit test-ranks test-clusters test-hosts

test-unit: install
	$(BIN)/python -m pytest tests/unit -n $(UNIT_PROCESSES) --maxprocesses 8 --durations 10

test-ranks: install
	$(BIN)/python -m pytest tests/ranks -n 2 --dist loadfile --durations 10

test-clusters: install
	$(BIN)/python -m pytest tests/cluster tests/incidents -n 2 --dist loadfile --durations 20

# And whatever else there is.
test-hosts: install
	$(BIN)/python -m pytest --ignore tests/unit --ignore tests/ranks --ignore tests/cluster \
		--ignore tests/incidents --durations 10

# What was measured is in OUT; without a GPU everything is skipped, with the reason.
test-gpu:
	OCTAVO_GPU_OUT=$(abspath $(OUT)) $(GPU_PYTHON) -m pytest tests/gpu

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m tests.benchmarks $(if $(RESUME),--resume)

incidents: install
	$(BIN)/python -m tests.incidents --out $(OUT)/incidents.md

faults: install
	$(BIN)/python -m tests.hosts.faults --out $(OUT)/faults.md $(if $(ROWS),--rows $(ROWS)) $(if $(REPEAT),--repeat $(REPEAT)) $(if $(RESUME),--resume)

deploy-hosts: install
	$(BIN)/python -m tests.hosts.rendered

audit: install
	$(BIN)/python -m deploy.audit constraints.txt

clean:
	rm -rf .venv *.egg-info
