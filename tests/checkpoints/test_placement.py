"""Arrays put in parts and gathered: the bits on each chip are the host's, and each byte is put once. The oracle is the
host's own array, cut by hand.
"""

import math
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from comfyui_tpu.tpu_runtime.checkpoints import placement, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.placement import PutsInFlight
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("dp", "sp", "tp")[: len(sizes)])


def random_bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Every kind of bits: negative zeros, subnormals, infinities, NaN with payloads."""
    words = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return np.random.default_rng(3).integers(0, np.iinfo(words).max, shape, words, endpoint=True).view(dtype)


@pytest.fixture
def put_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is put from here on; everything is large enough to be split."""
    sizes, put = [], jax.device_put
    monkeypatch.setattr(placement, "MIN_SPLIT_BYTES", 1)

    def counted(array: np.ndarray, device: jax.Device) -> jax.Array:
        sizes.append(array.nbytes)
        return put(array, device)

    monkeypatch.setattr(placement.jax, "device_put", counted)
    return sizes


SHAPES = [(16, 3), (7, 5), (3, 24, 5), (1, 1001), (1,), (3, 129, 2), (2, 0)]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.int8], ids=str)
@pytest.mark.parametrize("chips", [1, 2, 3, 8])
def test_place_replicated_array_puts_each_byte_once(chips: int, dtype: Any, put_bytes: list[int]):
    for shape in SHAPES:
        put_bytes.clear()
        array = random_bits(shape, dtype)
        placed = placement.place(shape, NamedSharding(mesh_of(chips), P()), lambda index, a=array: a, PutsInFlight())
        assert placed.shape == shape and len(placed.addressable_shards) == chips
        for shard in placed.addressable_shards:
            assert np.asarray(shard.data).tobytes() == array.tobytes(), (shape, shard.device)
        # One part a chip; of an axis that does not divide, less than a row a chip is padding.
        padding = (chips - 1) * max(array[:1].nbytes, array.nbytes // max(shape)) if array.size else 0
        assert len(put_bytes) == chips and array.nbytes <= sum(put_bytes) <= array.nbytes + padding, shape


@pytest.mark.parametrize(
    ("sizes", "spec", "copies"),
    [
        ((2, 4), P(None, "sp"), 2),
        ((2, 4), P("dp"), 4),
        ((2, 4), P("sp", "dp"), 1),
        ((2, 2, 2), P(None, ("dp", "tp")), 2),
        ((3, 2), P("sp"), 3),
        ((1, 8), P(None, "dp"), 8),
    ],
)
def test_place_sharded_array_with_copies_keeps_bits(sizes: tuple[int, ...], spec: P, copies: int, put_bytes: list[int]):
    array = random_bits((8, 12, 5), ml_dtypes.bfloat16)
    sharding = NamedSharding(mesh_of(*sizes), spec)
    placed = placement.place(array.shape, sharding, lambda index: array[index], PutsInFlight())
    for device, index in sharding.devices_indices_map(array.shape).items():
        (shard,) = (shard for shard in placed.addressable_shards if shard.device == device)
        assert np.asarray(shard.data).tobytes() == array[index].tobytes(), device
    assert placed.sharding == sharding
    assert sum(put_bytes) <= array.nbytes + (copies - 1) * array.nbytes / 4
    assert np.asarray(placed).tobytes() == array.tobytes()


def test_place_small_array_is_put_on_every_chip(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "_gather", lambda *args, **more: pytest.fail("a small array was split"))
    array = np.arange(12, dtype=np.float32)
    placed = placement.place((12,), NamedSharding(mesh_of(8), P()), lambda index: array, PutsInFlight())
    assert [np.asarray(shard.data).tolist() for shard in placed.addressable_shards] == [array.tolist()] * 8


# --- what the host holds ----------------------------------------------------------------------------------------------


class Slow:
    """An array on its way: it arrives when it is waited for."""

    def __init__(self, name: str, waited: list[str], is_deleted: bool = False) -> None:
        self.name, self.waited, self.deleted, self.arrived = name, waited, is_deleted, False

    def is_ready(self) -> bool:
        return self.arrived

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> None:
        assert not self.deleted
        self.arrived = True
        self.waited.append(self.name)


def test_puts_in_flight_keeps_at_most_two_puts():
    waited: list[str] = []
    in_flight = PutsInFlight()
    for number in range(4):
        in_flight.add([Slow(f"{number}a", waited), Slow(f"{number}b", waited)], 10)
        assert in_flight.size_bytes == min(20, 10 * (number + 1))
    assert waited == ["0a", "0b", "1a", "1b"]
    in_flight.wait_for_all()
    assert in_flight.size_bytes == 0 and waited[-1] == "3b"


def test_puts_in_flight_ignores_deleted_arrays():
    in_flight, waited = PutsInFlight(), list[str]()
    in_flight.add([Slow("rounded", waited, is_deleted=True)], 10)
    assert in_flight.size_bytes == 0
    in_flight.add([Slow("late", waited)], 10)
    in_flight.add([Slow("rounded", waited, is_deleted=True), Slow("there", waited)], 10)
    in_flight.wait_for_all()
    assert waited == ["late", "there"]


@pytest.mark.parametrize("piece_bytes", [40, 100, 300])
def test_read_shards_host_memory_stays_within_read_ahead(monkeypatch: pytest.MonkeyPatch, piece_bytes: int):
    """A disk that is faster than the chips: nothing arrives until it is waited for."""
    held, most = [0], [0]
    monkeypatch.setattr(weight_loader, "READ_AHEAD_BYTES", 100)

    class Piece:
        size_bytes = piece_bytes

        def begin(self, pool: object, reader: object) -> None:
            held[0] += piece_bytes
            most[0] = max(most[0], held[0])

        def finish(self) -> np.ndarray:
            return np.zeros(piece_bytes, np.int8)

    class Landing(Slow):
        def block_until_ready(self) -> None:
            super().block_until_ready()
            held[0] -= piece_bytes

    monkeypatch.setattr(weight_loader._PendingShard, "list_for_weight", lambda *args: [Piece() for _ in range(9)])
    in_flight, reader = PutsInFlight(), type("Stopped", (), {"stop": weight_loader.threading.Event()})()
    wanted: Any = {"weight": None}
    with weight_loader.read_shards(reader, None, {"weight": ()}, wanted, in_flight) as pieces:  # type: ignore[arg-type]
        count = 0
        for piece in pieces:
            in_flight.add([Landing("piece", [])], piece.nbytes)
            count += 1
    assert count == 9 and most[0] <= max(100, piece_bytes)


def test_load_weights_replicated_weight_puts_each_byte_once(put_bytes: list[int], tmp_path: Any):
    """Through `load` itself, from a file that another library wrote."""
    from comfyui_tpu.tpu_runtime.files import TensorFile
    from comfyui_tpu.tpu_runtime.programs.upstream_network import Weight
    from safetensors.torch import save_file

    values = torch.randn(24, 16, dtype=torch.bfloat16)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    file = TensorFile(path=tmp_path / "model.safetensors", name="weight", shape=(24, 16), dtype="BF16")
    network: Any = type(
        "OneWeight",
        (),
        {"weights": {"weight": Weight(shape=(24, 16), sources=("weight",), stacked=False, keep_float32=False)}},
    )()
    want = jax.ShapeDtypeStruct((24, 16), jax.numpy.bfloat16, sharding=NamedSharding(mesh_of(8), P()))
    progress: Any = type(
        "Silent", (), {"text": lambda *a: None, "step": lambda *a: None, "check_cancelled": lambda s: 0}
    )()
    (placed,) = weight_loader.load_weights(network, {"weight": (file,)}, {"weight": want}, "one", progress).values()
    assert sum(put_bytes) == values.nbytes
    for shard in placed.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values.view(torch.int16).numpy().tobytes()
