# make demo    fine-tune the small Stable Diffusion 3 of gerl until it can write (about three minutes on two cores)
# make test    the test suite; with GERL_DRILLS=all also the rest of the signals and kills, which CI sends
# make test-versions  the tests with the oldest and newest versions that pyproject.toml allows, in environments of their own,
#              of OLDEST=python3.11, for which the oldest have wheels, and of PYTHON
# make check   lint, formatting, types, the links of the documentation
# make docs    the documentation as a site, in site/
# make clean   remove the environment and everything built; outputs/ stays
# ARGS="..." is passed on: make demo ARGS="trainer.steps=5", make test ARGS="tests/unit -x"

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
OLDEST ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
ARGS ?=
# packages of the trackers and those of what they need that the environment has not, as tests/apart.py says
TRACKERS := wandb xxhash trackio brotli gradio-client httpcore httpx orjson python-multipart mlflow-skinny alembic \
	cachetools databricks-sdk mako sqlalchemy sqlparse swanlab prettytable pwinput pydantic-settings pyecharts \
	pyroaring simplejson wcwidth
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
APART := --upgrade --no-deps --target $(VENV)
DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs# whose theme would advertise a successor of it
CACHING := env -u PYTHONDONTWRITEBYTECODE # as on most machines: files that change must be read again, folders stay clean

.PHONY: help demo test test-versions check docs clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile

demo: $(DEMO)
	$(BIN)/python -m gerl.trainer.main_flowgrpo $(ARGS)

test: $(STAMP)
	$(CACHING) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(GERL_DRILLS),--durations=40) $(ARGS)

test-versions:
	$(OLDEST) tests/versions.py oldest $(ARGS)
	$(PYTHON) tests/versions.py newest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gerl reward_models
	@folder=$$(mktemp -d) && $(DOCS) build --strict --site-dir "$$folder"; found=$$?; rm -rf "$$folder"; exit $$found

docs: $(STAMP)
	$(DOCS) build --strict
	@echo "site/index.html; with its search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

$(DEMO): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "gerl needs Python 3.11 or newer with the venv module (Debian, Ubuntu: apt install\
	 python3-venv); none found, name one: make PYTHON=/path/to/python" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "gerl needs Python 3.11 or newer: PYTHON=$(PYTHON) is older or cannot be run" >&2; exit 1; }
	@echo "installing gerl into $(VENV), once, in some minutes: torch, diffusers, peft, ray and what else gerl needs (some GB),"
	@echo "an OCR that judges the demo's images, and a small web server for gerl watch and gerl studio"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[ocr,studio]'
	@touch $@

$(STAMP): $(DEMO)
	@echo "installing what the test suite needs beside:"
	@echo "1/6  pytest, ruff, mypy, mkdocs and the packages of gerl's extras"
	@$(PIP) -e '.[dev]'
	@# apart from the rest: the wheels of torchvision do not fit a CPU build of torch (tests/torchvision_ops.py)
	@echo "2/6  open_clip, for tests of the scorer hpsv2"
	@$(PIP) $(APART)/open_clip open-clip-torch timm torchvision ftfy wcwidth
	@echo "3/6  scipy, for those of the scorer geneval"
	@$(PIP) $(APART)/scipy scipy  # apart as well: tests/apart.py says why
	@echo "4/6  torchao, for those of base models in 8 or 4 bits"
	@$(PIP) $(APART)/torchao torchao
	@echo "5/6  wandb, trackio, mlflow and swanlab, for those of the trackers, in a folder of their own"
	@$(PIP) $(APART)/trackers $(TRACKERS)
	@echo "6/6  optuna and submitit, for those of sweeps"
	@# Hydra looks through all plugins that it finds, which takes time
	@$(PIP) $(APART)/sweepers hydra-optuna-sweeper optuna sqlalchemy alembic Mako cmaes cliff cloudpickle \
		hydra-submitit-launcher submitit
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-* build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
	find gerl reward_models tests -name __pycache__ -type d -prune -exec rm -rf {} +
