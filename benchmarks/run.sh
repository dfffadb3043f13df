#!/usr/bin/env bash
# All benchmarks against their peers; writes docs/benchmarks.md. `make bench` calls it with the project's Python first on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" benchmarks/run.py --rounds "${ROUNDS:-5}" --write docs/benchmarks.md
