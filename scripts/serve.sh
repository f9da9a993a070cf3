#!/bin/sh
# Serve a model: sets up an environment in the checkout, then `jaxllm serve "$@"`. Without a model it serves the embedded default one.
set -eu
. "$(dirname -- "$0")/environment.sh"

# The build of jax that drives this machine's accelerator: CUDA 13 needs a driver of 580 or newer; a TPU shows by its vendor, 1ae0.
accelerator_extra() {
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1) || driver=""
    if [ "${driver:-0}" -ge 580 ] 2>/dev/null; then
        echo cuda13
    elif [ "${driver:-0}" -gt 0 ] 2>/dev/null; then
        echo cuda12
    elif grep -qs 0x1ae0 /sys/bus/pci/devices/*/vendor; then
        echo tpu
    fi
}

ensure_venv "$ROOT/.venv" "$(accelerator_extra)"
exec "$ROOT/.venv/bin/jaxllm" serve "$@"
