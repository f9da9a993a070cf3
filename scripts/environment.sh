# Sourced by the other scripts: finds a Python and keeps a virtual environment in the checkout.
#
#   ROOT            the checkout
#   ensure_venv DIR EXTRAS   makes DIR hold jaxllm (installed in place) with the given extras; quick when nothing changed

ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
MINIMUM="3, 11"

say() { printf '%s\n' "jaxllm: $*" >&2; }
fail() { say "$*"; exit 1; }

# Prints "base-prefix version" of a usable interpreter; fails for one that is missing, too old, or cannot make environments.
# A version manager's launcher may be on PATH for a Python that is not selected, so that only running it tells.
describe_python() {
    "$1" -c "
import sys
if sys.version_info < ($MINIMUM):
    sys.exit(3)
import ensurepip, venv
print(sys.base_prefix, sys.version.split()[0])
" 2>/dev/null
}

# Sets PYTHON_FOUND and PYTHON_KEY. $PYTHON, where set, is the only candidate.
find_python() {
    found=""
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON cannot be run; name a Python of 3.11 or newer, or unset it"
        set -- "$PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.11 python3.14
    fi
    for candidate in "$@"; do
        if PYTHON_KEY=$(describe_python "$candidate"); then
            PYTHON_FOUND=$candidate
            return 0
        fi
        if version=$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null); then
            case $version in
                3.1[1-9].* | 3.[2-9][0-9].*) found="$found; $candidate ($version) has no venv or ensurepip: install your system's python3-venv package" ;;
                *) found="$found; $candidate is $version" ;;
            esac
        fi
    done
    fail "needs Python 3.11 or newer${found:-; found none}. Install one, or name it: PYTHON=/path/to/python3.11 $0"
}

ensure_venv() {
    venv=$1
    extras=$2
    find_python
    key="$PYTHON_KEY $(cksum < "$ROOT/pyproject.toml")"
    stamp="$venv/jaxllm-${extras:-base}.stamp"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && [ -x "$venv/bin/jaxllm" ]; then
        return 0
    fi
    if [ "$(cat "$venv/jaxllm-base.stamp" 2>/dev/null)" != "$key" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say "creating $venv with $PYTHON_FOUND (${PYTHON_KEY##* })"
        rm -rf -- "$venv"
        "$PYTHON_FOUND" -m venv "$venv" || fail "$PYTHON_FOUND could not create $venv"
    fi
    target=$ROOT${extras:+[$extras]}
    say "installing jaxllm${extras:+ [$extras]} and its dependencies; the next start skips this"
    "$venv/bin/python" -m pip install --disable-pip-version-check --editable "$target" >&2 ||
        fail "installing failed; pip's messages above say why. Run the same command again to retry"
    printf '%s\n' "$key" > "$venv/jaxllm-base.stamp"
    printf '%s\n' "$key" > "$stamp"
}
