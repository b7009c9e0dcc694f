"""What core's nodes change in a CLIP, on core's torch CLIP of files and on ours: states, and what is saved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPT = 'a sign with "open" on it'
Change = Callable[[Any], Any]


def lora(clip: Any, strengths: tuple[float, ...] = (0.8,)) -> Any:
    """By LoraLoader: some matrices of each encoder, a norm and the table of tokens."""
    import comfy.sd
    import torch

    generator = torch.Generator().manual_seed(4)
    tensors: dict[str, Any] = {}
    for key, weight in sorted(clip.cond_stage_model.state_dict().items()):
        name = f"text_encoders.{key.removesuffix('.weight')}"
        if key.endswith((".0.layer.0.SelfAttention.q.weight", "layers.1.self_attn.k_proj.weight")) or (
            key.endswith((".1.layer.1.DenseReluDense.wo.weight", "layers.0.mlp.down_proj.weight"))
        ):
            tensors[f"{name}.lora_up.weight"] = 0.3 * torch.randn(weight.shape[0], 4, generator=generator)
            tensors[f"{name}.lora_down.weight"] = 0.3 * torch.randn(4, weight.shape[1], generator=generator)
            tensors[f"{name}.alpha"] = torch.tensor(2.0)
        elif key.endswith(("shared.weight", "embed_tokens.weight", "layers.0.input_layernorm.weight")):
            tensors[f"{name}.diff"] = 0.2 * torch.randn(weight.shape, generator=generator)
    for strength in strengths:
        clip = comfy.sd.load_lora_for_models(None, clip, dict(tensors), 0.0, strength)[1]
    assert len(clip.patcher.patches) == len([name for name in tensors if name.endswith((".lora_up.weight", ".diff"))])
    return clip


def merge_change(name: str, *numbers: float) -> Change:
    """A CLIP with a LoRA, merged with one that has another strength of it."""
    from comfy_extras import nodes_model_merging

    return lambda clip: getattr(nodes_model_merging, name)().merge(lora(clip), lora(clip, (-0.5,)), *numbers)[0]


def with_difference(clip: Any) -> Any:
    """As a model is made of two others' difference."""
    from comfy_extras import nodes_model_merging

    return nodes_model_merging.CLIPAdd().merge(clip, merge_change("CLIPSubtract", 0.2)(clip))[0]


def last_layer(number: int) -> Change:
    import nodes

    return lambda clip: nodes.CLIPSetLastLayer().set_last_layer(clip, number)[0]


def multiply_attention(clip: Any) -> Any:
    """Of queries and keys, where core's names have these."""
    from comfy_extras.nodes_attention_multiply import CLIPAttentionMultiply

    return CLIPAttentionMultiply.execute(clip, 1.3, 0.8, 1.0, 1.1).result[0]


def pad_tokens(clip: Any) -> Any:
    """As T5TokenizerOptions does."""
    found = clip.clone()
    for kind in ("t5xxl", "umt5xxl"):
        found.set_tokenizer_option(f"{kind}_min_length", 9)
    return found


def changes() -> dict[str, Change]:
    return {
        "LoraLoader": lora,
        "two LoRAs": lambda clip: lora(clip, (0.8, -0.3)),
        "CLIPMergeSimple": merge_change("CLIPMergeSimple", 0.3),
        "CLIPMergeAdd": merge_change("CLIPAdd"),
        "CLIPMergeSubtract": with_difference,
        **{f"CLIPSetLastLayer {number}": last_layer(number) for number in (-1, -2, -3, -24)},
        "CLIPSetLastLayer and LoraLoader": lambda clip: last_layer(-2)(lora(clip)),
        "tokenizer options": pad_tokens,
        "CLIPAttentionMultiply": multiply_attention,
    }


# Of each encoder; how weights are changed does not depend on it.
FEW = (
    "LoraLoader",
    "CLIPAttentionMultiply",
    "CLIPSetLastLayer -1",
    "CLIPSetLastLayer -2",
    "CLIPSetLastLayer -3",
    "CLIPSetLastLayer -24",
)


def compared(ours: Any, theirs: Any, relative: Callable[[Any, Any], float], *, every: bool) -> dict[str, float | str]:
    """The relative L2 of the states by change, or the sentence that refuses it: of `every` change, or of a `FEW`."""
    assert _tensor_shapes(ours).items() <= _tensor_shapes(theirs).items()

    def encode(clip: Any) -> Any:
        return clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))[0][0]

    plain, found = encode(theirs), {}
    for name, change in changes().items():
        if not every and name not in FEW:
            continue
        wanted = encode(change(theirs))
        try:
            found[name] = relative(encode(change(ours)), wanted)
        except ValueError as error:
            found[name] = str(error)
        if "Lora" in name or "Merge" in name:
            assert relative(plain, wanted) > 1e-3, (name, "changes nothing")
    assert relative(encode(ours), plain) < 1e-4, "a clone's change stays"
    return found | dict(_bypass_refusals(ours))


def _tensor_shapes(clip: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in clip.cond_stage_model.state_dict().items()}


def _bypass_refusals(clip: Any) -> Iterator[tuple[str, str]]:
    found = clip.clone()
    found.patcher.set_injections("bypass_lora", [object()])
    try:
        found.encode_from_tokens(found.tokenize(PROMPT))
    except ValueError as error:
        yield "LoraLoaderBypass", str(error)
    try:
        clip.generate(clip.tokenize(PROMPT))
    except ValueError as error:
        yield "TextGenerate", str(error)


def extracted(ours: Any, theirs: Any, folder: Path) -> None:
    """LoraSave writes the LoRA of a difference of two CLIPs, of ours as of core's."""
    import folder_paths
    from comfy.utils import load_torch_file
    from comfy_extras import nodes_lora_extract, nodes_model_merging

    subtract, files = nodes_model_merging.CLIPSubtract(), []
    for kind, clip in (("ours", ours), ("theirs", theirs)):
        folder_paths.set_output_directory(str(folder / kind))
        (difference,) = subtract.merge(lora(clip), clip, 1.0)
        nodes_lora_extract.LoraSave.execute("extracted", 4, "full_diff", True, None, difference)
        (path,) = (folder / kind).glob("extracted*")
        tensors = {name: x.float() for name, x in load_torch_file(str(path)).items()}
        largest = max(x.abs().max() for x in tensors.values())
        files.append({name: x for name, x in tensors.items() if x.abs().max() > 1e-3 * largest})
    found, wanted = files
    assert found.keys() == wanted.keys() and wanted, found.keys() ^ wanted.keys()
    for name, x in wanted.items():
        assert (found[name] - x).norm() <= 2e-3 * x.norm(), name


def saved(ours: Any, theirs: Any, paths: Sequence[str], folder: Path) -> None:
    """CLIPSave writes the same tensors of both, changed or not; of ours those that the files at `paths` have."""
    from comfy.utils import load_torch_file
    from comfy_extras.nodes_model_merging import CLIPSave

    known = {name for path in paths for name in load_torch_file(path)}
    known |= {name for name in theirs.state_dict_for_saving() if ".transformer." not in name}
    known |= {name.split(".", 1)[-1] for name in known if name.endswith("logit_scale")}
    for change in (lambda clip: clip, lora):
        files: list[Mapping[str, Any]] = []
        for kind, clip in (("ours", ours), ("theirs", theirs)):
            node = CLIPSave()
            node.output_dir = str(folder / kind)
            node.save(change(clip), "clip")
            files.append({path.name: load_torch_file(str(path)) for path in sorted((folder / kind).iterdir())})
        assert files[0].keys() == files[1].keys()
        for found, wanted in zip(files[0].values(), files[1].values(), strict=True):
            wanted = {name: x for name, x in wanted.items() if name.split(".transformer.")[-1] in known}
            assert found.keys() == wanted.keys() and wanted, found.keys() ^ wanted.keys()
            for name, tensor in wanted.items():
                assert found[name].shape == tensor.shape
                error = (found[name].float() - tensor.float()).abs().max()
                assert error <= 1e-6 * tensor.float().abs().max(), (name, error)
