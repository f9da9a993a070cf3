#!/bin/sh
# Set up an environment in the checkout, then run every check; arguments go to pytest. All checks run, and any failure fails the script.
#   scripts/test.sh                         everything
#   scripts/test.sh -m "not heavy"          the core
#   VENV=.venv-other scripts/test.sh        in another environment of the checkout
#   EXTRAS=test,plan-tpu scripts/test.sh    with more extras than the tests need at least; those that lack theirs are skipped
set -eu
. "$(dirname -- "$0")/environment.sh"

venv=${VENV:-$ROOT/.venv}
case $venv in
    /*) ;;
    *) venv=$ROOT/$venv ;;
esac
ensure_venv "$venv" "${EXTRAS:-test}"
cd "$ROOT"
export JAX_PLATFORMS=cpu

failed=""
check() {
    say "$*"
    "$venv/bin/$@" || failed="$failed $1"
}
check ruff check .
check ruff format --check .
check mypy
check lint-imports
# A file of tests goes to one process, since its fixtures are costly; -n 0 runs everything in this one. In tests/conftest.py's
# order: in that of numbers of tests, the slowest tests, which are alone in their files, would come last, with all others waiting.
check pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
[ -z "$failed" ] || fail "failed:$failed"
say "all checks passed"
