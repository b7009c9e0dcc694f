"""The table of chips against hand counts, and the slices against what libtpu describes."""

import importlib.util
import itertools
import math
import re

import pytest
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.cost_model import chips, interconnect

# Matrix units of one device: how many, how wide, and how many rows each takes per cycle.
MXUS = {"v4": (8, 128, 1), "v5e": (4, 128, 1), "v5p": (8, 128, 1), "v6e": (2, 256, 2), "tpu7x": (2, 256, 2)}


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.generation)
def test_chip_peak_flops_match_matrix_units(chip: chips.Chip):
    count, width, rows = MXUS[chip.generation]
    assert chip.flop_per_cycle == pytest.approx(count * width * width * rows * 2, rel=2e-3)
    assert chip.mxu_width == width


@pytest.mark.parametrize("target", chips.TOPOLOGIES, ids=lambda target: target.name)
def test_topology_matches_libtpu_devices(target: chips.Topology):
    devices = chips.compile_devices(target)
    assert len(devices) == target.num_devices
    assert {device.device_kind for device in devices} == {target.chip.device_kind}
    assert len({tuple(device.coords) for device in devices}) == target.num_chips


HOSTS = [target for target in chips.TOPOLOGIES if not target.options and target.num_chips > 4]


@pytest.mark.parametrize(
    ("target", "shape", "hosts"),
    [
        (chips.Topology(name="v6e:2x4"), MeshShape(dp=2, sp=4), [{0}, {1}]),
        (chips.Topology(name="v6e:2x4"), MeshShape(sp=2, tp=4), [{0}, {1}]),
        (chips.topology("v6e:4x4"), MeshShape(dp=2, sp=8), [{0, 1}, {2, 3}]),
        (chips.topology("v6e:4x4"), MeshShape(dp=2, sp=2, tp=4), [{0}, {1}, {2}, {3}]),
        (chips.topology("v6e:4x8"), MeshShape(dp=2, sp=16), [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        *((target, MeshShape(dp=2, sp=target.num_chips // 2), None) for target in HOSTS),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_make_mesh_rows_lie_on_fewest_neighbouring_hosts(
    target: chips.Topology, shape: MeshShape, hosts: list[set[int]] | None
):
    """Whatever order devices come in: of the innermost axis that has several, each row fills a box of whole hosts."""
    devices = chips.compile_devices(target)
    for given in (devices, sorted(devices, key=lambda device: device.id), devices[::-1]):
        mesh = make_mesh(given, shape)
        rows = mesh.devices.reshape(-1, shape.tp if shape.tp > 1 else shape.sp)
        found = [{device.process_index for device in row} for row in rows]
        assert hosts is None or found == hosts
        assert all(not one & other for one, other in itertools.combinations(found, 2))
        for row in rows:
            sides = [{device.coords[side] for device in row} for side in range(3)]
            assert math.prod(max(side) - min(side) + 1 for side in sides) == len(row)


@pytest.mark.parametrize(
    ("said", "meant"), [("v6e-8", "v6e:2x4"), ("V6E:2x4 ", "v6e:2x4"), ("v5p-8", "v5p:2x2x1"), ("7x-8", "tpu7x:2x2x1")]
)
def test_topology_accepts_common_slice_names(said: str, meant: str):
    assert chips.topology(said).name == meant


def test_topology_unknown_name_lists_known_slices():
    with raises_message(ValueError, "plan.no_topology", name="'v6e:3x3'"):
        chips.topology("v6e:3x3")


def test_larger_returns_slices_of_the_same_generation():
    assert [found.name for found in chips.larger(chips.topology("v5e-1"))] == ["v5e:2x2", "v5e:2x4"]
    assert chips.larger(chips.topology("v6e-64")) == ()


def test_compile_devices_without_libtpu_names_package_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises_message(RuntimeError, "plan.libtpu_missing", libtpu=re.compile(r"^libtpu==")):
        chips.compile_devices(chips.topology("v6e-8"))


# On 2x4 chips in libtpu's order, (0, 1, 2, 3) is a square of four: a ring without detours.
SQUARES = ((0, 1, 2, 3), (4, 5, 6, 7))
ALL = (tuple(range(8)),)
# Two apart: every pair's way leads over another pair's link.
PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("kind", "groups", "share"),
    [
        ("all-gather", SQUARES, 3 / 4 / 2),     # three quarters arrive, half of them over each of two links
        ("reduce-scatter", SQUARES, 3 / 4 / 2),
        ("all-reduce", SQUARES, 2 * 3 / 4 / 2),
        ("all-gather", ALL, 7 / 8 / 2),
        ("all-gather", PAIRS, 2 * 1 / 2),
        ("all-to-all", SQUARES, 2 / 4),         # a quarter to each neighbour, half a quarter twice for the corners
        ("all-to-all", ALL, 4 * 4 / 8 / 2),     # half of the chips send half of their data over two middle links
        ("collective-permute", ((0, 1), (1, 0)), 1),
        ("collective-permute", ((0, 4), (2, 6)), 2),
        ("collective-permute", ((3, 3),), 0),
    ],
)  # fmt: skip
def test_link_bytes_of_busiest_link_match_hand_count(kind: str, groups: interconnect.Groups, share: float):
    devices = chips.compile_devices(chips.topology("v6e-8"))
    loads = interconnect.link_bytes(kind, 1000.0, groups, devices)
    assert max(loads.values(), default=0) == pytest.approx(1000 * share)


def test_link_bytes_between_devices_of_one_chip_are_zero():
    devices = chips.compile_devices(chips.topology("tpu7x:2x2x1"))
    assert not any(interconnect.link_bytes("all-gather", 1.0, ((0, 1), (2, 3)), devices).values())
