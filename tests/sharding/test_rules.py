"""Parameter rules: what they place, and what they refuse by name."""

import functools
import math
from collections.abc import Mapping

import jax
import pytest
from comfyui_tpu.sharding.mesh import make_mesh, mesh_shape
from comfyui_tpu.sharding.rules import GATHERED_AXES, MIB, REPLICATED, Layout, Param, Rule, ShardingError, lay_out
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.models import SPECS
from comfyui_tpu.tpu_runtime.precision import Precision
from comfyui_tpu.tpu_runtime.programs import network_call, upstream_network, weights

EIGHT = MeshShape(dp=2, sp=4)
BIG = Param(shape=(40, 5120, 5120), size_bytes=2000 * MIB)


def test_make_mesh_keeps_device_order():
    for shape in (MeshShape(sp=8), MeshShape(dp=2, sp=4), MeshShape(dp=2, sp=2, tp=2)):
        mesh = make_mesh(jax.devices(), shape)
        assert mesh_shape(mesh) == shape
        assert list(mesh.devices.flat) == jax.devices()
    with pytest.raises(ValueError, match="mesh dp=1 sp=3 tp=1 needs 3 devices, but there are 8"):
        make_mesh(jax.devices(), MeshShape(sp=3))


def test_lay_out_splits_at_rest_and_gathers_for_use():
    rule = Rule("blocks.*.*.weight", (None, "fsdp", "heads"))
    layout = lay_out({"blocks.*.q.weight": BIG}, [rule], MeshShape(sp=8))["blocks.*.q.weight"]
    assert layout.at_rest == (None, ("sp",), None)
    assert layout.in_use == (None, None, None)


def test_lay_out_tries_fallbacks_in_order():
    rule = Rule("w", ("fsdp", None), fallbacks=((None, "fsdp"),))
    assert lay_out({"w": Param(shape=(7, 16), size_bytes=99 * MIB)}, [rule], EIGHT)["w"].at_rest == (None, ("dp", "sp"))
    small = Param(shape=(7, 9), size_bytes=MIB)
    assert lay_out({"w": small}, [rule], EIGHT)["w"].at_rest == ()


@pytest.mark.parametrize(
    ("params", "rules", "message"),
    [
        ({"w": BIG}, [], "no sharding rule matches w with shape (40, 5120, 5120) (2000.0 MiB)"),
        ({"b": Param(shape=(4,), size_bytes=16)}, [Rule("x.weight", (None,))], "match no parameter: x.weight."),
        ({"w": Param(shape=(7, 9), size_bytes=65 * MIB)}, [Rule("w", ("fsdp", None))], "cannot be split on the mesh"),
        ({"w": BIG}, [Rule("w", ("fsdp", None))], "but the rule 'w' names 2 dimensions"),
        ({"w": BIG}, [Rule("w", (None, "fsdp", "all_heads"))], "put one mesh axis on two dimensions"),
    ],
)
def test_lay_out_invalid_rules_raise_error_with_parameter_name(params: dict, rules: list[Rule], message: str):
    with pytest.raises(ShardingError) as error:
        lay_out(params, rules, EIGHT)
    assert message in str(error.value)


def test_lay_out_replicated_rule_allows_large_weight():
    assert lay_out({"w": BIG}, [Rule("w", REPLICATED)], EIGHT)["w"].at_rest == ()


def test_rule_star_matches_one_part_of_a_name():
    assert Rule("blocks.*.attn.weight", ()).matches("blocks.*.attn.weight")
    assert not Rule("blocks.*.weight", ()).matches("blocks.*.attn.weight")
    assert Rule("blocks.**.weight", ()).matches("blocks.*.attn.to_q.weight")
    assert not Rule("a.b", ()).matches("axb")


# Models share components: each once, with the meshes that those models' programs run on.
PARTS = {id(part): (f"{spec.name} {part.name}", part) for spec in reversed(SPECS) for part in spec.components}
FORMATS: dict[Precision, int] = {"bfloat16": 1, "float32": 2}


@functools.cache
def network_of(part: int) -> upstream_network.Network:
    component = PARTS[part][1]
    return upstream_network.build_network(component, component.config)


def meshes_of(part: int, chips: int) -> set[MeshShape]:
    """Of steps; of another network that of its calls, which a decoder's mesh differs from in names alone."""
    steps = {
        spec.parallelism.mesh(chips, branches).fit_heads(int(component.config.get(spec.parallelism.heads_key, chips)))
        for spec in SPECS
        for component in spec.components
        if id(component) == part and component.name in spec.denoiser.experts
        for branches in (1, 2)
    }
    return steps or {MeshShape(sp=chips)}


def bytes_per_chip(params: Mapping[str, Param], layouts: Mapping[str, Layout], mesh: MeshShape) -> int:
    total = 0
    for name, param in params.items():
        axes = [axis for entry in layouts[name].at_rest if entry for axis in entry]
        total += param.size_bytes // math.prod(mesh.sizes[axis] for axis in axes)
    return total


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("part", [pytest.param(part, id=name) for part, (name, _) in PARTS.items()])
def test_lay_out_published_architectures_split_every_large_weight(part: int, precision: Precision):
    """Every rule matches, every large weight has one, nothing over 64 MiB of bfloat16 is whole on every chip, but of a
    network that is meant to be.
    """
    network, times = network_of(part), FORMATS[precision]
    is_whole = Rule("**", REPLICATED) in network.component.rules
    axes = {axis for rule in network.component.rules for axis in rule.axes}
    params = weights.param_shapes(network, precision)
    total = sum(param.size_bytes for param in params.values())
    for chips in (1, 2, 4, 8, 16):
        for mesh in meshes_of(part, chips):
            layouts = lay_out(params, network.component.rules, mesh)
            large = [name for name, p in params.items() if p.size_bytes > times * 64 * MIB]
            assert chips == 1 or is_whole or all(any(layouts[name].at_rest) for name in large)
            # Those that are only split over `tp` every group of it has.
            shares = mesh.tp if "heads" in axes and not axes & GATHERED_AXES else chips
            # Beside its share a chip holds small weights whole, which in a VAE is nearly all there is.
            assert is_whole or bytes_per_chip(params, layouts, mesh) < total / shares + times * 1024 * MIB


@pytest.mark.parametrize(
    ("chips", "height", "width", "expected"),
    [(8, 90, 160, (1, 8)), (8, 60, 106, (4, 2)), (3, 10, 14, (1, 1)), (8, 10, 14, (2, 2)), (1, 5, 7, (1, 1))],
)
def test_choose_image_mesh_uses_most_chips_that_divide_the_image(chips, height, width, expected):
    shape = network_call.choose_image_mesh(chips, height, width)
    assert (shape.dp, shape.sp) == expected
    assert shape.num_devices == chips
