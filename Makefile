# Few words, each does its own set-up: an environment in .venv with the versions of constraints.txt.
#   make run          the main job: one model trained under every ZeRO implementation on two local ranks
#   make test         what every change must pass (README: how long it takes)
#   make proof        every stage in every layout beside PyTorch's engines: a verdict and one page; ten minutes on two cores
#   make test-all     and the tests that take long, stress, larger matrices, browser and Slurm
#   make test-deepspeed  what needs DeepSpeed, in .venv-deepspeed: all that .venv has, and DeepSpeed
#   make mutants      240 small bugs put into the sources, by chance, and some by hand: the tests should find 95 of 100
#   make wide         every matrix in full: strangers' training code, engines, checkpoints; hundreds of drawn models
#   make lint         ruff and pyright
#   make bench-quick  every engine on a 24M model, two ranks, loopback; three minutes on two cores of their own
#   make bench        every engine, both models, shaped links (as root); writes docs/measured.md
#   make bench-checkpoints  saving and loading, ours beside torch's, on 24M and 135M; five minutes; writes docs/measured.md
#   make docs         the pages of docs/ as a site in build/site; a dead link ends it
#   make report       the table of the newest sweep in outputs/
#   make clean        removes the environment and caches, keeps outputs/

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export MLFLOW_DISABLE_TELEMETRY := true
export DISABLE_MLFLOW_INTEGRATION := true
# Where it is set, as in many containers, every process of every test would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run proof test test-all test-deepspeed wide mutants lint bench bench-quick bench-checkpoints docs report clean
.DELETE_ON_ERROR:
# Two targets at once would install into one environment.
.NOTPARALLEL:

run: .venv/base.stamp
	timeout 1200 $(BIN)/zeroexp study=compare

proof: .venv/base.stamp
	timeout 3600 $(BIN)/zeroexp study=proof

# One process more than two cores, since a third of a test's time is waiting; whichever is done first takes some of what
# another has left.
IN_THREE := -n 3 --dist worksteal

# No limit for all of it: each test has one (pyproject.toml), and whoever stops a run is told what has not run.
test: .venv/test.stamp
	$(BIN)/python -m pytest -q $(IN_THREE) --durations=25 -m "not slow and not slurm and not browser and not wide"

# The rest one after another: daemons, and as many processes as two cores can bear.
test-all: test
	$(BIN)/python -m pytest -q --durations=25 -m "slow or slurm or browser"

test-deepspeed: .venv-deepspeed/deepspeed.stamp
	.venv-deepspeed/bin/python -m pytest -q -m deepspeed tests/strategies tests/checkpoint/test_pairs.py tests/checkpoint/test_foreign.py

wide: .venv/test.stamp
	$(BIN)/python -m pytest -q -n 2 -m wide

mutants: .venv/test.stamp
	$(BIN)/python -m tests.mutation.run --by-hand --jobs 2
	$(BIN)/python -m tests.mutation.run --number 240 --jobs 2

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff check --preview --select PLW1514 # text is opened in a named encoding
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench-quick: .venv/base.stamp
	timeout 1800 $(BIN)/python -m benchmarks.run --quick
	$(BIN)/python -m benchmarks.check

bench: .venv/base.stamp .venv-deepspeed/deepspeed.stamp
	timeout 7200 .venv-deepspeed/bin/python -m benchmarks.run --write docs/measured.md

bench-checkpoints: .venv/base.stamp
	timeout 900 $(BIN)/python -m benchmarks.checkpoints --write docs/measured.md

# Only warnings that mkdocs counts are read; NO_MKDOCS_2_WARNING is the theme's own news.
docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 timeout 300 $(BIN)/mkdocs build -q

report: .venv/base.stamp
	$(BIN)/zeroexp report

clean:
	rm -rf .venv .venv-deepspeed build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/base.stamp: pyproject.toml constraints.txt
	@echo "installing into .venv (several minutes the first time)"
	@$(PYTHON) -m venv .venv
	@timeout 1800 $(BIN)/pip install -q -c constraints.txt -e .
	@touch $@

.venv/test.stamp .venv/dev.stamp .venv/docs.stamp: .venv/%.stamp: .venv/base.stamp
	@timeout 900 $(BIN)/pip install -q -c constraints.txt -e '.[$*]'
	@touch $@

# Its setup asks for torch, so that it can not be built in isolation; no extension of it is compiled.
.venv-deepspeed/deepspeed.stamp: .venv/test.stamp
	@$(PYTHON) -m venv .venv-deepspeed
	@for packages in "$(CURDIR)"/.venv/lib/python*/site-packages; do \
		echo "import site; site.addsitedir('$$packages')" >$$(echo .venv-deepspeed/lib/python*/site-packages)/beside.pth; done
	@timeout 300 .venv-deepspeed/bin/pip install -q -c constraints.txt wheel ninja py-cpuinfo
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu timeout 300 \
		.venv-deepspeed/bin/pip install -q --no-build-isolation -c constraints.txt deepspeed
	@touch $@
