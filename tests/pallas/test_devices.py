"""Targets by the names that people use."""

import pytest

from pallas_kernels.devices import DEVICES, UnknownTargetError, parse_target


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices"),
    [
        ("v6e:2x2", "v6e:2x2", 4, 4),
        ("v5e", "v5e:1x1", 1, 1),
        ("v5p:2x2", "v5p:2x2x1", 4, 4),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, 8),
        ("H100:4", "h100:4", 4, 4),
        ("b200", "b200:1", 1, 1),
    ],
)
def test_targets_are_read(text, name, chips, devices):
    target = parse_target(text)
    assert (target.name, target.num_chips, target.num_devices) == (name, chips, devices)


@pytest.mark.parametrize(
    ("text", "message"),
    [("v9:2x2", "known: v4, v5e"), ("v6e:3x3", "v6e comes as v6e:1x1, v6e:2x2"), ("h100:9", "h100:8")],
)
def test_an_unknown_target_is_refused_with_those_that_are(text, message):
    with pytest.raises(UnknownTargetError, match=message):
        parse_target(text)


def test_every_kind_of_device_has_its_figures():
    for device in DEVICES.values():
        assert 16 * 2**30 <= device.hbm_bytes < 2**38
        # The ridge of the roofline: FLOPs for each byte.
        assert 100 < device.bf16_flops / device.hbm_bytes_per_s < 700
        assert device.platform == "gpu" or device.vmem_bytes >= 2**24
