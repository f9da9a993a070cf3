#!/bin/sh
# Serve a model: sets up an environment in the checkout, then `jaxllm serve "$@"`. Without a model it serves the embedded default one.
set -eu
. "$(dirname -- "$0")/environment.sh"

# The build of jax that drives this machine's accelerator, found by its driver or its PCI vendor (Google's is 1ae0).
accelerator_extra() {
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        echo cuda12
    elif grep -qs 0x1ae0 /sys/bus/pci/devices/*/vendor; then
        echo tpu
    fi
}

ensure_venv "$ROOT/.venv" "$(accelerator_extra)"
exec "$ROOT/.venv/bin/jaxllm" serve "$@"
