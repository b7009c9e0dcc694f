"""Run in a process of its own: core's nodes that merge and save models, on core's torch models of files and on ours.

Arguments: ComfyUI's folder and a job as JSON: that of `core_graphs` for a denoiser, with the files of a `clip` and a
`vae`, and a `sibling` of other sizes. Prints the relative L2 of samples by merge, and the sentences of what is refused,
as JSON, last.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def main(comfyui: str, job: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch

    with torch.inference_mode():
        models = Models(json.loads(job))
        models.check_saved_models()
        models.check_extracted()
        models.check_saved_checkpoint()
        models.check_saved_vae()
        models.check_asked()
        found = models.merges() | models.refusals()
    print(json.dumps(found))


class Models:
    def __init__(self, job: Mapping[str, Any]) -> None:
        import comfy.sd
        import torch
        from comfyui_tpu.nodes.comfyui import core_model
        from comfyui_tpu.tests.comfyui import core_graphs
        from comfyui_tpu.tpu_runtime.progress import SilentProgress

        import nodes

        self.job = job
        self.graphs = core_graphs.Graphs(nodes, job)
        self.load = lambda path: core_model.load_model(path, "float32", SilentProgress)
        self.theirs = comfy.sd.load_diffusion_model(job["path"], {"dtype": torch.float32})
        self.ours = self.load(job["path"])

    # --- merges -------------------------------------------------------------------------------------------------------

    def merges(self) -> dict[str, float]:
        from comfyui_tpu.tests.comfyui.core_parts import relative

        found = {}
        for name, (merge, first, second) in self.cases().items():
            ours, theirs = (self.graphs.sample(merge(*pair), steps=2) for pair in ((first, second), self.own_pair()))
            found[name] = relative(ours, theirs)
        merge, *_ = self.cases()["simple"]
        plain, merged = (self.graphs.sample(model, steps=2) for model in (self.ours, merge(*self.own_pair())))
        assert relative(plain, merged) > 1e-3, "the merge changes nothing"
        assert relative(plain, self.graphs.sample(self.theirs, steps=2)) < 1e-4, "a merge stays"
        return found

    def own_pair(self) -> tuple[Any, Any]:
        """Of core's torch models, as each case has ours."""
        return self.graphs.with_lora(self.theirs, 0.4), self.graphs.with_lora(self.theirs, -0.6)

    def cases(self) -> dict[str, tuple[Callable[..., Any], Any, Any]]:
        first, second = self.graphs.with_lora(self.ours, 0.4), self.graphs.with_lora(self.ours, -0.6)
        their_first, their_second = self.own_pair()
        simple, add, subtract = (
            self.node(*how) for how in (("ModelMergeSimple", 0.3), ("ModelAdd",), ("ModelSubtract", 0.2))
        )
        return {
            "simple": (simple, first, second),
            "add": (add, first, second),
            "add a difference": (lambda one, other: add(one, subtract(one, other)), first, second),
            "blocks": (self.node("ModelMergeBlocks", input=0.2, middle=0.7, out=0.4), first, second),
            "a LoRA on a merge": (lambda *both: self.with_lora(simple(*both)), first, second),
            "a merge of a merge": (lambda one, other: simple(simple(one, other), other), first, second),
            "ours into core's": (simple, their_first, second),
            "core's into ours": (simple, first, their_second),
        }

    def with_lora(self, model: Any) -> Any:
        import comfy.sd

        return comfy.sd.load_lora_for_models(model, None, dict(self.graphs.lora), 0.5, 0)[0]

    def node(self, name: str, *numbers: float, **named: float) -> Callable[..., Any]:
        from comfy_extras import nodes_model_merging

        node = getattr(nodes_model_merging, name)()
        return lambda one, other: node.merge(one, other, *numbers, **named)[0]

    # --- files --------------------------------------------------------------------------------------------------------

    def saved(self, name: str, *given: Any) -> dict[str, Any]:
        from comfy.utils import load_torch_file
        from comfy_extras import nodes_model_merging

        node = getattr(nodes_model_merging, name)()
        node.output_dir = str(Path.cwd() / "saved")
        before = set(Path(node.output_dir).rglob("*"))
        node.save(*given, "file", prompt={"1": {}}, extra_pnginfo={"workflow": {"nodes": []}})
        (path,) = (one for one in set(Path(node.output_dir).rglob("*")) - before if one.is_file())
        assert path.suffix == ".safetensors"
        self.path = path
        return load_torch_file(str(path))

    def check_saved_models(self) -> None:
        """As core saves its own, patched or not; core's loader takes the file, and so does ours."""
        import comfy.sd

        for change in (lambda model: model, self.graphs.with_lora, lambda model: self.node("ModelMergeSimple", 0.3)(
            self.graphs.with_lora(model), model
        )):  # fmt: skip
            found, wanted = (self.saved("ModelSave", change(model)) for model in (self.ours, self.theirs))
            check_equal(found, wanted)
        again = comfy.sd.load_diffusion_model(str(self.path))
        check_equal(dict(again.model.diffusion_model.state_dict()), without(wanted, "model.diffusion_model."))

    def check_extracted(self) -> None:
        """LoraSave writes the LoRA of a difference of two models, of ours as of core's own."""
        import folder_paths
        from comfy.utils import load_torch_file
        from comfy_extras.nodes_lora_extract import LoraSave

        folder = Path.cwd() / "extracted"
        folder_paths.set_output_directory(str(folder))
        subtract = self.node("ModelSubtract", 1.0)
        for kind in ("full_diff", "standard"):
            files = []
            for model in (self.ours, self.theirs):
                LoraSave.execute(kind, 4, kind, True, subtract(self.graphs.with_lora(model), model))
                files.append(load_torch_file(str(sorted(folder.glob(f"{kind}*"))[-1])))
            found, wanted = map(changes_of, files)
            assert found.keys() == wanted.keys() and len(wanted) > 4, found.keys() ^ wanted.keys()
            size = max(x.norm() for x in wanted.values())
            assert size > 0.1 and all((found[name] - x).norm() < 2e-3 * size for name, x in wanted.items())

    def check_saved_checkpoint(self) -> None:
        """Its three networks are those of their files, and core's loader takes it."""
        import comfy.sd
        from comfy.utils import load_torch_file
        from comfyui_tpu.nodes.comfyui import core_text_and_vae
        from comfyui_tpu.tests.comfyui.core_parts import relative
        from comfyui_tpu.tpu_runtime.progress import SilentProgress
        from safetensors.torch import save_file

        clip = core_text_and_vae.load_clip(self.job["clip"], "wan", "float32", SilentProgress)
        vae = core_text_and_vae.load_vae(self.job["vae"], "float32", SilentProgress)
        found = self.saved("CheckpointSave", self.ours, clip, vae)
        files = {"model.diffusion_model.": self.job["path"], "vae.": self.job["vae"]}
        files["text_encoders.umt5xxl.transformer."] = self.job["clip"][0]
        prefixes = {"vae.": next(p for p in ("vae.", "first_stage_model.") if any(k.startswith(p) for k in found))}
        for prefix, path in files.items():
            wanted = load_torch_file(path)
            wanted.pop("spiece_model", None)
            check_equal(without(found, prefixes.get(prefix, prefix)), wanted)
        model, _, read, _ = comfy.sd.load_checkpoint_guess_config(str(self.path), output_clip=False)
        check_equal(dict(model.model.diffusion_model.state_dict()), load_torch_file(self.job["path"]))
        check_equal(dict(read.first_stage_model.state_dict()), load_torch_file(self.job["vae"]))
        # So does ours: also of a model that has no use for the VAE's encoder. The text encoder has another width.
        both = {name: x for name, x in found.items() if not name.startswith("text_encoders.")}
        save_file(both, "both.safetensors")
        latents = self.graphs.draw(1, 16, 2, 8, 6)
        own = core_text_and_vae.load_vae("both.safetensors", "float32", SilentProgress)
        assert relative(own.decode(latents), read.decode(latents)) < 1e-4
        pixels = self.graphs.draw(5, 32, 48, 3).sigmoid()
        assert relative(own.encode(pixels.clone()), read.encode(pixels.clone())) < 1e-4

    def check_saved_vae(self) -> None:
        from comfy.utils import load_torch_file
        from comfyui_tpu.nodes.comfyui import core_text_and_vae
        from comfyui_tpu.tpu_runtime.progress import SilentProgress

        vae = core_text_and_vae.load_vae(self.job["vae"], "float32", SilentProgress)
        check_equal(self.saved("VAESave", vae), load_torch_file(self.job["vae"]))

    def check_asked(self) -> None:
        """What nodes ask for by name is there, or a sentence says why not."""
        from comfyui_tpu.nodes.comfyui import core_text_and_vae
        from comfyui_tpu.tests.corenodes import calls
        from comfyui_tpu.tpu_runtime.progress import SilentProgress

        objects = {
            "MODEL": self.ours,
            "CLIP": core_text_and_vae.load_clip(self.job["clip"], "wan", "float32", SilentProgress),
            "VAE": core_text_and_vae.load_vae(self.job["vae"], "float32", SilentProgress),
            "CLIP_VISION": core_text_and_vae.load_clip_vision(self.job["vision"], "float32", SilentProgress),
        }
        for kind, found in objects.items():
            for name in calls.WORKS[kind].split():
                calls.resolve(found, name)
            for name in calls.REFUSED.get(kind, "").split():
                use = functools.partial(calls.resolve, found, name)
                if name == "generate":
                    use = functools.partial(found.generate, found.tokenize("a cat"))
                sentence = error_message(use)
                assert "For that node, load" in sentence, (kind, name, sentence)
        for name in calls.ABSENT["MODEL"].split():
            assert type(attempt(self.ours, name)) is type(attempt(self.theirs, name)), name

    # --- what is refused ----------------------------------------------------------------------------------------------

    def refusals(self) -> dict[str, str]:
        import comfy.model_management
        import torch
        from comfy.utils import save_torch_file
        from comfyui_tpu.nodes.comfyui import core_text_and_vae
        from comfyui_tpu.tpu_runtime.progress import SilentProgress

        vae = core_text_and_vae.load_vae(self.job["vae"], "float32", SilentProgress)
        vae.patcher.add_patches({next(iter(vae.get_sd())): (torch.ones(1),)})
        folder = Path.cwd()
        uses: dict[str, Callable[[], Any]] = {
            "another size": lambda: self.graphs.sample(
                self.node("ModelMergeSimple", 0.3)(self.ours, self.load(self.job["sibling"]))
            ),
            "no values": lambda: save_torch_file({"a": torch.ones(2, device="meta")}, str(folder / "no.safetensors")),
            "a patched VAE": lambda: vae.decode(torch.zeros(1, 16, 1, 8, 8)),
            "a saved patched VAE": lambda: self.saved("VAESave", vae),
            "training": lambda: self.ours.model.requires_grad_(False).train(),
            "another device": lambda: self.ours.deepclone_multigpu(new_load_device=torch.device("cpu")),
            "its memory": lambda: self.ours.model_state_dict()["diffusion_model.head.head.weight"].data_ptr(),
            "a part of the VAE": lambda: vae.first_stage_model.per_channel_statistics,
        }  # fmt: skip
        found = {name: error_message(use) for name, use in uses.items()}
        comfy.model_management.interrupt_current_processing()
        try:
            self.saved("ModelSave", self.ours)
        except comfy.model_management.InterruptProcessingException:
            found["cancelled"] = "cancelled"
        assert not list(folder.rglob("*.part")) and not (folder / "no.safetensors").exists()
        return found


def attempt(found: Any, name: str) -> Any:
    from comfyui_tpu.tests.corenodes import calls

    try:
        return calls.resolve(found, name)
    except AttributeError:
        return None


def error_message(use: Callable[[], Any]) -> str:
    try:
        use()
    except (ValueError, AttributeError) as error:
        return str(error)
    return "done"


def changes_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What a LoRA file adds to each weight; zeros are no change, whose matrices core may leave out."""
    found = {name: x.float() for name, x in tensors.items() if ".diff" in name}
    for name, up in tensors.items():
        if name.endswith(".lora_up.weight"):
            down = tensors[name.replace("lora_up", "lora_down")]
            found[name] = up.float() @ down.float() if up.ndim == 2 else up.float().flatten(1)
    largest = max(x.abs().max() for x in found.values())
    return {name: x for name, x in found.items() if x.abs().max() > 1e-3 * largest}


def without(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def check_equal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert found and found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:9]
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype, (name, found[name], tensor)
        error = (found[name].float() - tensor.float()).abs().max() if tensor.numel() else 0.0
        assert error <= 1e-6 * tensor.float().abs().max() + 1e-9 if tensor.numel() else True, (name, error)


if __name__ == "__main__":
    main(*sys.argv[1:])
