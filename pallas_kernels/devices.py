"""Facts of the accelerators that we plan and compile for, in one table, and the slices that can be had of them. No jax here.

Sources: the system architecture pages of cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x), jax-ml.github.io/scaling-book for the links
of TPUs, and NVIDIA's data sheets of the SXM modules (A100 80 GB, H100, H200, HGX B200), without sparsity, and the memory that CUDA has.
Figures are those of one jax device: a chip, or half of a tpu7x, whose chips appear as two devices.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

MIB, GIB, TERA = 2**20, 2**30, 10**12

_TPU_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_TPU_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_GPUS = ("1", "2", "3", "4", "5", "6", "7", "8")


@dataclass(frozen=True)
class Device:
    """One kind of accelerator.

    Attributes:
        name: as in targets. kind: as jax spells it.
        hbm_bytes, hbm_bytes_per_s, bf16_flops: of a device; FLOP/s of dense bfloat16 products.
        link_bytes_per_s: what a device can send to others at once: both directions of a ring on TPUs, NVLink on GPUs.
        slices: sizes that can be had, in chips, small to large.
        vmem_bytes, smem_bytes: memory of one core that a TPU kernel may plan with; v4's is the smallest by far.
    """

    name: str
    kind: str
    platform: Literal["tpu", "gpu"]
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops: float
    link_bytes_per_s: float
    slices: tuple[str, ...]
    vmem_bytes: int = 0
    smem_bytes: int = MIB
    devices_per_chip: int = 1


def _tpu(name: str, kind: str, hbm: int, bandwidth: float, flops: float, link: float, slices: tuple[str, ...], vmem: int) -> Device:
    return Device(name, kind, "tpu", hbm * GIB, bandwidth * TERA, flops * TERA, link * TERA, slices, vmem * MIB)


def _gpu(name: str, kind: str, hbm_mib: int, bandwidth: float, flops: float, link: float) -> Device:
    return Device(name, kind, "gpu", hbm_mib * MIB, bandwidth * TERA, flops * TERA, link * TERA, _GPUS)


DEVICES = {
    device.name: device
    for device in (
        _tpu("v4", "TPU v4", 32, 1.2, 275, 0.09, _TPU_3D, 16),
        _tpu("v5e", "TPU v5 lite", 16, 0.8, 197, 0.09, _TPU_2D, 128),
        _tpu("v5p", "TPU v5", 95, 2.765, 459, 0.18, _TPU_3D, 64),
        _tpu("v6e", "TPU v6 lite", 32, 1.6, 918, 0.18, _TPU_2D, 128),
        replace(_tpu("tpu7x", "TPU7x", 96, 3.69, 1153.5, 0.1, _TPU_3D, 64), devices_per_chip=2),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 81157, 2.039, 312, 0.3),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 81007, 3.35, 989.4, 0.45),
        _gpu("h200", "NVIDIA H200", 143771, 4.8, 989.4, 0.45),
        _gpu("b200", "NVIDIA B200", 182642, 8.0, 2250, 0.9),
    )
}
_BY_KIND = {device.kind: device for device in DEVICES.values()}


class UnknownTargetError(ValueError):
    """No such accelerator, or no such slice of it; the message says which there are."""


def is_blackwell(kind: str) -> bool:
    """Whether GPUs that jax calls `kind` have tcgen05 and tensor memory: those of data centers, not their namesakes for workstations."""
    return re.search(r"\bG?B(200|300)\b", kind) is not None


def find_device(kind: str) -> Device:
    """The device of a jax device_kind; an unknown one (newer than this table) is planned like the smallest recent TPU."""
    return _BY_KIND.get(kind) or replace(DEVICES["tpu7x"], name=kind, kind=kind)


@dataclass(frozen=True)
class Target:
    """A slice of TPUs ("v6e:2x2") or some GPUs of one host ("h100:4")."""

    device: Device
    slice: str

    @property
    def name(self) -> str:
        return f"{self.device.name}:{self.slice}"

    @property
    def num_chips(self) -> int:
        return math.prod(map(int, self.slice.split("x")))

    @property
    def num_devices(self) -> int:
        """Devices as jax counts them."""
        return self.num_chips * self.device.devices_per_chip


def parse_target(text: str) -> Target:
    """The target of "v6e:2x2", "v5p:2x2x1", "h100" or "h100:8"; without a size the smallest one.

    Raises:
        UnknownTargetError: no such target; the message says which there are.
    """
    name, _, size = text.lower().partition(":")
    device = DEVICES.get(name)
    if device is None:
        raise UnknownTargetError(f"target {text!r}: no such accelerator; known: {', '.join(DEVICES)}")
    wanted = size or device.slices[0]
    for candidate in device.slices:
        # Slices of three dimensions may leave out a last one of 1.
        if wanted in (candidate, candidate.removesuffix("x1") if candidate.count("x") == 2 else candidate):
            return Target(device, candidate)
    raise UnknownTargetError(f"target {text!r}: {name} comes as {', '.join(f'{name}:{s}' for s in device.slices)}")
