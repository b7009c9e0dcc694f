"""Headers of GGUF files: with lists as long as real ones, and as a stranger may write them.

The oracle of whole files is the `gguf` package, of llama.cpp's own repository.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from comfyui_tpu.tests.properties.hostile import ends_well, spoiled
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.formats import gguf_file, gguf_header, single_file, tokenizer_files
from comfyui_tpu.tpu_runtime.models import LAYOUTS
from hypothesis import given, settings
from hypothesis import strategies as st

U32, F32, TEXT, ARRAY, U64 = 4, 6, 8, 9, 10


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name.encode()) + struct.pack("<I", kind) + value


def gguf_array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str, shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(fields: list[bytes], tensors: list[bytes] = (), *, version: int = 3, counts: tuple[int, int] = ()) -> bytes:  # type: ignore[assignment]
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join((*fields, *tensors))
    return head + bytes(-len(head) % 32 + 64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "file.gguf"


def read(path: Path) -> None:
    """What a queue check, and then the encoder's loading, read of a file."""
    tensors, _ = gguf_file.read_gguf(path)
    carried = tokenizer_files.find_tokenizer(path, tensors)
    single_file.find_networks(path, LAYOUTS)
    if carried is not None:
        tokenizer_files.write_tokenizer(carried, path.with_suffix(""))


VALUES = {
    "u8": st.integers(0, 255), "i32": st.integers(-(2**31), 2**31 - 1), "f32": st.floats(width=32, allow_nan=False),
    "bool": st.booleans(), "text": st.text(max_size=9), "texts": st.lists(st.text(max_size=9), min_size=1, max_size=9),
    "ints": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9),
    "floats": st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9),
}  # fmt: skip


@settings(max_examples=40)
@given(values=st.fixed_dictionaries(VALUES), alignment=st.sampled_from([8, 32, 256]))
def test_read_gguf_header_matches_gguf_package(path: Path, values: dict, alignment: int):
    writer = gguf.GGUFWriter(str(path), "wan")
    writer.add_custom_alignment(alignment)
    writer.add_uint8("x.u8", values["u8"])
    writer.add_int32("x.i32", values["i32"])
    writer.add_float32("x.f32", values["f32"])
    writer.add_bool("x.bool", values["bool"])
    writer.add_string("x.text", values["text"])
    for name in ("texts", "ints", "floats"):
        writer.add_array(f"x.{name}", values[name])
    writer.add_tensor("a.weight", np.ones((3, 5), np.float32))
    writer.add_tensor("b.weight", np.ones((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    oracle = gguf.GGUFReader(path)
    header = gguf_header.read_gguf_header(path)
    own = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert dict(header.fields) == own
    wanted = {one.name: (tuple(reversed(one.shape.tolist())), one.data_offset) for one in oracle.tensors}
    assert {name: (one.shape, header.data + one.offset) for name, one in header.tensors.items()} == wanted


WHOLE = file_of(
    [
        entry("general.architecture", TEXT, text(b"llama")),
        entry("llama.attention.head_count", U32, struct.pack("<I", 2)),
        entry("tokenizer.ggml.model", TEXT, text(b"gpt2")),
        entry("tokenizer.ggml.pre", TEXT, text(b"qwen2")),
        entry("tokenizer.ggml.tokens", ARRAY, gguf_array(TEXT, 3, text(b"a") + text(b"ab") + text(b"<|endoftext|>"))),
        entry("tokenizer.ggml.merges", ARRAY, gguf_array(TEXT, 1, text(b"a b"))),
        entry("tokenizer.ggml.token_type", ARRAY, gguf_array(5, 3, struct.pack("<3i", 1, 1, 3))),
        entry("tokenizer.ggml.eos_token_id", U32, struct.pack("<I", 2)),
        entry("comfy.gguf.orig_shape.b", ARRAY, gguf_array(U32, 2, struct.pack("<2I", 2, 2))),
    ],
    [tensor("blk.0.attn_q.weight", (1, 4)), tensor("token_embd.weight", (4, 2)), tensor("b")],
)


@settings(max_examples=300)
@given(content=spoiled(WHOLE))
def test_read_gguf_arbitrary_bytes_fail_cleanly(path: Path, content: bytes):
    path.write_bytes(content)
    ends_well(lambda: read(path), len(content))


LONGEST = gguf_header.MAX_TEXTS
CLAIMS: dict[str, Callable[[], bytes]] = {
    "fields": lambda: file_of([], counts=(0, 2**63)),
    "tensors": lambda: file_of([], counts=(2**63, 0)),
    "many fields": lambda: file_of([entry(str(n), 0, b"\0") for n in range(20_000)]),
    "many tensors": lambda: file_of([], [tensor(str(n)) for n in range(20_000)]),
    "tensors as many as are read": lambda: file_of([], [tensor(str(n)) for n in range(gguf_header.MAX_TENSORS)]),
    "one name twice": lambda: file_of([], [tensor("a"), tensor("a")]),
    "a long list of numbers": lambda: file_of([entry("a", ARRAY, gguf_array(F32, 2**62, b""))]),
    "a long list of texts": lambda: file_of([entry("a", ARRAY, gguf_array(TEXT, 2**62, b""))]),
    "a list of lists": lambda: file_of([entry("a", ARRAY, gguf_array(ARRAY, 1, gguf_array(ARRAY, 1, b"")))]),
    "a long text": lambda: file_of([entry("a", TEXT, struct.pack("<Q", 2**63))]),
    "a long text in a list": lambda: file_of([entry("a", ARRAY, gguf_array(TEXT, 2, struct.pack("<Q", 2**63)))]),
    "a long name": lambda: file_of([struct.pack("<Q", 2**40)], counts=(0, 1)),
    "no known kind": lambda: file_of([entry("a", 13, b"")]),
    "many dimensions": lambda: file_of([], [tensor("a", (1,) * 9)]),
    "a huge tensor": lambda: file_of([], [tensor("a", (2**62, 2**62))]),
    "a tensor beyond the end": lambda: file_of([], [tensor("a", offset=2**62)]),
    "no whole blocks": lambda: file_of([], [tensor("a", (33,), kind=8)]),
    "no known format": lambda: file_of([], [tensor("a", kind=10**6)]),
    "an alignment of zero": lambda: file_of([entry("general.alignment", U32, bytes(4))]),
    "an alignment of a text": lambda: file_of([entry("general.alignment", TEXT, text(b"32"))]),
    "another shape": lambda: file_of(
        [entry("comfy.gguf.orig_shape.a", ARRAY, gguf_array(U64, 1, struct.pack("<Q", 5)))], [tensor("a")]
    ),
    "a shape of many dimensions": lambda: file_of(
        [entry("comfy.gguf.orig_shape.a", ARRAY, gguf_array(U32, 10**5, b"\1\0\0\0" * 10**5))], [tensor("a")]
    ),
    "heads without end": lambda: file_of(
        [
            entry("general.architecture", TEXT, text(b"llama")),
            entry("llama.attention.head_count", ARRAY, gguf_array(U32, 10**6, bytes(4 * 10**6))),
        ],
        [tensor("blk.0.attn_q.weight")],
    ),
    "an architecture that is no text": lambda: file_of([entry("general.architecture", TEXT, text(b"\xff\xfe"))]),
    "big-endian": lambda: file_of([], version=3 << 24),
    "version 1": lambda: file_of([], version=1),
    "nothing": lambda: b"",
    "its name alone": lambda: b"GGUF",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_read_gguf_false_header_claim_raises_checkpoint_error(path: Path, name: str):
    content = CLAIMS[name]()
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read(path)
    gguf_file._read_header.cache_clear()
    single_file._read.cache_clear()
    ends_well(lambda: read(path), len(content))


def test_read_gguf_millions_of_empty_strings_stay_within_limits(path: Path):
    """Four MiB of them took 2.8 GiB."""
    for count in (2**19, LONGEST + 1):
        content = file_of(
            [entry("tokenizer.ggml.tokens", ARRAY, gguf_array(TEXT, count, bytes(8 * count)))], [tensor("a")]
        )
        path.write_bytes(content)
        ends_well(lambda: gguf_file.read_gguf(path), len(content) // 20)
    with raises_message(
        CheckpointError,
        "file.gguf_unreadable",
        error=f"its lists have {LONGEST + 1} texts, and {LONGEST} are read at most",
    ):
        gguf_file.read_gguf(path)


def test_read_gguf_oversized_header_fails_cleanly(path: Path):
    """The file has holes: nothing of it is written but its ends."""
    count = 2 * gguf_header.MAX_HEADER_BYTES // 2**20
    with path.open("wb") as file:
        file.write(file_of([entry("a", ARRAY, gguf_array(TEXT, count, b""))])[:-64])
        for _ in range(count):
            file.write(struct.pack("<Q", 2**20))
            file.seek(2**20, os.SEEK_CUR)
        file.truncate()
    ends_well(lambda: gguf_file.read_gguf(path), 0)
    path.unlink()


def test_read_gguf_large_vocabulary_stays_within_limits(path: Path):
    """UMT5's header kept 815 MiB and took 20 s. What is kept now are places, not tokens."""
    count = 256_384
    tokens = b"".join(text(f"▁{number}".encode()) for number in range(count))
    content = file_of(
        [
            entry("general.architecture", TEXT, text(b"t5encoder")),
            entry("tokenizer.ggml.model", TEXT, text(b"t5")),
            entry("tokenizer.ggml.tokens", ARRAY, gguf_array(TEXT, count, tokens)),
            entry("tokenizer.ggml.scores", ARRAY, gguf_array(F32, count, bytes(4 * count))),
        ],
        [tensor("token_embd.weight", (4, 2))],
    )
    path.write_bytes(content)
    ends_well(lambda: gguf_file.read_gguf(path), 2**16)
    fields = gguf_file.read_gguf(path)[1]
    assert fields["tokenizer.ggml.tokens"][-1] == f"▁{count - 1}" and fields.length("tokenizer.ggml.scores") == count


def test_read_gguf_leaves_no_open_or_mapped_file(path: Path):
    """A deleted file's place on the disk is free at once."""
    path.write_bytes(WHOLE)
    gguf_file.read_gguf(path)
    held = Path("/proc/self/maps").read_text()
    links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert str(path) not in held and not any(str(path) in link for link in links)


def test_gguf_fields_of_replaced_file_raise_checkpoint_error(path: Path):
    path.write_bytes(WHOLE)
    fields = gguf_file.read_gguf(path)[1]
    path.write_bytes(bytes(len(WHOLE) + 1))
    with raises_message(CheckpointError, "file.changed_while_read"):
        fields["general.architecture"]
