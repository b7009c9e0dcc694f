"""GGUF files of denoisers and encoders by their writers' names, and the tokenizers that files carry along."""

import base64
import contextlib
import io
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.test_single_files import WAN, rest
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import tokenization
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, hub, tiny, virtual_folder, weight_loader
from comfyui_tpu.tpu_runtime.files import CheckpointError, read_header
from comfyui_tpu.tpu_runtime.formats import single_file, tokenizer_files
from comfyui_tpu.tpu_runtime.formats.file_signature import TensorShapes
from comfyui_tpu.tpu_runtime.models import LAYOUTS, lookup_spec
from comfyui_tpu.tpu_runtime.programs import upstream_network
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import load_file, save_file

SOURCE = tiny.ensure_random(WAN)


def write_gguf(path: Path, tensors: single_files.Tensors, architecture: str) -> str:
    """As ComfyUI-GGUF's converter: four dimensions at most, and the shape of those that had more."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if array.ndim > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(array.shape))
            array = array.reshape(len(array), -1)
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_gguf_of_wan_and_umt5_matches_folder_tensors(tmp_path: Path):
    denoiser = single_files.wan(single_files.load_folder(SOURCE / "transformer"))
    encoder = single_files.t5_llama(single_files.load_folder(SOURCE / "text_encoder"))
    # What heads a denoiser has its tensors do not tell: those of a miniature are none that a file without a config has.
    for folder, path in (
        ("transformer", write_gguf(tmp_path / "wan.gguf", denoiser, "wan")),
        ("text_encoder", write_gguf(tmp_path / "umt5.gguf", encoder, "t5encoder")),
    ):
        (held,) = single_file.find_networks(Path(path), LAYOUTS)
        theirs = single_files.load_folder(SOURCE / folder)
        with contextlib.ExitStack() as stack:
            reader = weight_loader.TensorReader(stack, lambda: None)
            ours = {name: reader.slice(tensor, ()) for name, tensor in virtual_folder.translate_tensors(held).items()}
        assert ours.keys() == theirs.keys()
        assert not [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    path = str(tmp_path / "umt5.gguf")
    assert checkpoint.locate(WAN, rest(WAN, path)).configs(SilentProgress())["text_encoder"]["num_heads"] == 5


def test_gguf_of_z_image_matches_folder_tensors(tmp_path: Path):
    """Its projections are one matrix there."""
    folder = tiny.ensure_random(lookup_spec("z-image-turbo")) / "transformer"
    theirs = single_files.load_folder(folder)
    path = write_gguf(tmp_path / "z_image.gguf", single_files.z_image(theirs), "lumina2")
    (held,) = single_file.find_networks(Path(path), LAYOUTS)
    with contextlib.ExitStack() as stack:
        reader = weight_loader.TensorReader(stack, lambda: None)
        ours = {name: reader.slice(tensor, ()) for name, tensor in virtual_folder.translate_tensors(held).items()}
    assert held.layout.class_name == "ZImageTransformer2DModel" and ours.keys() == theirs.keys()
    assert not [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


def write_as_stable_diffusion_cpp(path: Path, tensors: single_files.Tensors) -> Path:
    """As its `convert_tensors_to_gguf`: ggml counts dimensions up to the last that is not 1, which is torch's first,
    and the first two of five are one.
    """
    writer = gguf.GGUFWriter(str(path), "any")
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if array.ndim == 5:
            array = array.reshape(-1, *array.shape[2:])
        while array.ndim > 1 and array.shape[0] == 1:
            array = array[0]
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Networks whose weights have a first dimension of 1, or five: all of this kind that the families have.
OF_STABLE_DIFFUSION_CPP = [
    ("wan2.1-t2v-14b", "transformer"),
    ("wan2.1-flf2v-14b-720p", "transformer"),
    ("wan2.2-ti2v-5b", "transformer"),
    ("z-image-turbo", "transformer"),
    ("hunyuanvideo1.5-t2v-720p", "transformer"),
    ("flux2-klein-4b", "transformer"),
    ("wan2.1-t2v-14b", "vae_decoder"),
    ("hunyuanvideo1.5-t2v-720p", "vae_decoder"),
]


@pytest.mark.parametrize(("model", "name"), OF_STABLE_DIFFUSION_CPP)
def test_gguf_without_leading_dimensions_matches_folder_tensors(model: str, name: str, tmp_path: Path):
    spec = lookup_spec(model)
    component = spec.component(name)
    folder = tiny.ensure_random(spec) / component.folder
    config = json.loads((folder / "config.json").read_text())
    theirs = single_files.load_folder(folder)
    path = write_as_stable_diffusion_cpp(
        tmp_path / "file.gguf", single_files.makers(component.class_name, config, theirs)
    )
    (held,) = single_file.find_networks(path, LAYOUTS)
    network = upstream_network.build_network(component, config)
    files = checkpoint.match_weights(network, virtual_folder.translate_tensors(held), folder)
    with contextlib.ExitStack() as stack:
        reader = weight_loader.TensorReader(stack, lambda: None)
        for own, weight in network.weights.items():
            for source, file in zip(weight.sources, files[own], strict=True):
                wanted = theirs[source]
                assert torch.equal(reader.slice(file, ()), wanted), source
                part = tuple(slice(0, -(-size // 2)) for size in wanted.shape)
                assert torch.equal(reader.slice(file, part), wanted[part]), source
    own = held.layout.config(TensorShapes(virtual_folder.translate_tensors(held)), {**component.config, **config})
    for key in own.keys() & {"in_channels", "patch_size", "pos_embed_seq_len"}:
        assert own[key] == (tuple(config[key]) if isinstance(config[key], list) else config[key]), key


def test_gguf_without_patch_embedding_raises_checkpoint_error(tmp_path: Path):
    tensors = single_files.wan(single_files.load_folder(SOURCE / "transformer"))
    tensors.pop("patch_embedding.weight")
    with raises_message(CheckpointError, "file.no_known_network"):
        checkpoint.locate(WAN, rest(WAN, write_gguf(tmp_path / "wan.gguf", tensors, "wan")))


def sentencepiece_model() -> bytes:
    model = io.BytesIO()
    texts = ["a cat and a dog baking a cake together in a kitchen", "hello world, the quick brown fox 0123456789 !"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 30), model_writer=model, vocab_size=80, hard_vocab_limit=False,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3,
    )  # fmt: skip
    return model.getvalue()


def carried_by(path: Path) -> tokenizer_files.TokenizerFile | None:
    return tokenizer_files.find_tokenizer(path, single_file.read_contents(path).tensors)


PROMPTS = ["a cat and a dog", "hello  world", "  Zebra über 过曝 x", " a", "a\nb", "", "ﬁ x２", "x "]


def test_embedded_sentencepiece_model_is_used_as_tokenizer(tmp_path: Path):
    """As ComfyUI's `SPieceTokenizer` uses it."""
    model = sentencepiece_model()
    path = tmp_path / "umt5_xxl.safetensors"
    single_files.write(path, SOURCE / "text_encoder", "UMT5EncoderModel")
    metadata = read_header(path)[1]
    carried = torch.frombuffer(bytearray(model), dtype=torch.uint8)
    save_file({**load_file(path), "spiece_model": carried}, path, metadata)
    found = checkpoint.locate(WAN, rest(WAN, str(path)))
    assert found.folder("tokenizer", SilentProgress()) != SOURCE / "tokenizer"
    tokenizer = tokenization.load_tokenizer(found.folder("tokenizer", SilentProgress()))
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model, add_eos=True)
    for prompt in PROMPTS:
        assert tokenizer(prompt)["input_ids"] == oracle.encode(prompt)
    assert tokenizer("", padding="max_length", max_length=4)["input_ids"] == [1, 0, 0, 0]


# Where the tensor of a tokenizer is in a checkpoint of all networks: as ComfyUI saves it, and inside the encoder.
PLACES = ["text_encoders.", "text_encoders.umt5xxl.", "text_encoders.umt5xxl.transformer."]


@pytest.mark.parametrize("place", PLACES)
def test_embedded_tokenizer_in_combined_checkpoint_is_used(place: str, tmp_path: Path):
    model = sentencepiece_model()
    tensors = {f"text_encoders.umt5xxl.transformer.{name}": x for name, x in load_file(umt5(tmp_path)).items()}
    carried = torch.frombuffer(bytearray(model), dtype=torch.uint8)
    other = torch.zeros(9, dtype=torch.uint8)
    path = tmp_path / "all.safetensors"
    save_file({**tensors, f"{place}spiece_model": carried, "text_encoders.mistral.tekken_model": other}, path)
    (held,) = single_file.find_networks(path, LAYOUTS)
    assert held.layout.class_name == "UMT5EncoderModel"
    found = checkpoint.locate(WAN, rest(WAN, str(path)))
    tokenizer = tokenization.load_tokenizer(found.folder("tokenizer", SilentProgress()))
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model, add_eos=True)
    assert [tokenizer(prompt)["input_ids"] for prompt in PROMPTS] == [oracle.encode(prompt) for prompt in PROMPTS]
    # As a loader of ComfyUI's kind takes it.
    assert tokenizer_files.read_tokenizers(path, held.contents.tensors, held.prefix) == {"spiece_model": model}


def umt5(folder: Path) -> Path:
    return single_files.write(folder / "umt5.safetensors", SOURCE / "text_encoder", "UMT5EncoderModel")


def test_missing_tokenizer_error_mentions_small_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    files = [str(umt5(tmp_path))]
    for folder, kind in (("transformer", "WanTransformer3DModel"), ("vae", "AutoencoderKLWan")):
        files.append(str(single_files.write(tmp_path / f"{folder}.safetensors", SOURCE / folder, kind)))
    found = checkpoint.locate(WAN, " + ".join(files))
    with raises_message(hub.HubError, "checkpoint.no_tokenizer_in_files") as error:
        found.folder("tokenizer", SilentProgress())
    assert "comfyui-tpu download" not in str(error.value)


def tekken() -> bytes:
    """A tokenizer in Mistral's form: single bytes by rank, then merges."""
    more = [b"ca", b"cat", b" c", b" cat", b"do", b"dog", b" dog", b"an", b"and", b" a", b"ba", b"king"]
    vocabulary = [bytes([byte]) for byte in range(256)] + more
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<x{n}>" for n in range(5, 11)), "<pad>"]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return json.dumps(
        {
            "config": {
                "pattern": pattern, "default_vocab_size": len(vocabulary) + 20, "default_num_special_tokens": 20,
            },
            "vocab": [
                {"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(vocabulary)
            ],
            "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(special)],
        }
    ).encode()  # fmt: skip


def by_rank(text: str, pattern: str | None = None) -> list[int]:
    """Byte pairs of words merged by rank, which is what tekken is: the lowest first."""
    said = json.loads(tekken())
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in said["vocab"]}
    import regex

    found: list[int] = []
    for word in regex.findall(pattern or said["config"]["pattern"], text):
        parts = [bytes([byte]) for byte in word.encode()]
        while pairs := [
            (ranks[left + right], place)
            for place, (left, right) in enumerate(zip(parts, parts[1:], strict=False))
            if left + right in ranks
        ]:
            _, place = min(pairs)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        found += [ranks[part] + 20 for part in parts]
    return found


def test_embedded_tekken_is_used_as_tokenizer(tmp_path: Path):
    content = torch.frombuffer(bytearray(tekken()), dtype=torch.uint8)
    save_file({"tekken_model": content}, tmp_path / "mistral.safetensors")
    tensor = carried_by(tmp_path / "mistral.safetensors")
    assert tensor is not None
    tokenizer_files.write_tokenizer(tensor, tmp_path / "tokenizer", "{{ bos_token }}")
    tokenizer = tokenization.load_tokenizer(tmp_path / "tokenizer")
    for prompt in ("a cat and a dog", "hello  world", " Zebra über 过曝 12", "cats\n\nx!", "baking"):
        assert tokenizer(prompt, add_special_tokens=False)["input_ids"] == by_rank(prompt), prompt
    assert tokenizer("[INST]cat[/INST]", add_special_tokens=False)["input_ids"] == [3, *by_rank("cat"), 4]
    assert tokenizer.pad_token_id == 11 and tokenizer.chat_template == "{{ bos_token }}"


@pytest.mark.parametrize("name", ["spiece_model", "tekken_model"])
def test_embedded_invalid_tokenizer_raises_checkpoint_error(name: str, tmp_path: Path):
    for content in (b"", b"{}", b"\xff" * 100, np.arange(1000, dtype=np.uint8).tobytes()):
        save_file({name: torch.frombuffer(bytearray(content or b"x"), dtype=torch.uint8)}, tmp_path / "f.safetensors")
        tensor = carried_by(tmp_path / "f.safetensors")
        assert tensor is not None
        with raises_message(CheckpointError, "file.carried_tokenizer_unreadable"):
            tokenizer_files.write_tokenizer(tensor, tmp_path / "tokenizer")
