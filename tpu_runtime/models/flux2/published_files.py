"""FLUX.2's single files on the Hub."""

from ..common.published_files import Files, PublishedFiles, join_parts, list_denoisers, root_file, split_file

_DEV, _KLEIN, _KLEIN_9B = "Comfy-Org/flux2-dev", "Comfy-Org/flux2-klein", "Comfy-Org/flux2-klein-9B"
_VAE = (split_file(_DEV, "vae", "flux2-vae", 0.34),)
_QWEN_4B = (split_file(_KLEIN, "text_encoders", "qwen_3_4b", 8.04),)
_QWEN_8B = (split_file(_KLEIN_9B, "text_encoders", "qwen_3_8b_fp8mixed", 8.66),)


def _klein_fp8(name: str, size_gb: float) -> Files:
    """Return Black Forest Labs' own file of a klein."""
    repository = f"black-forest-labs/FLUX.2-klein-{name}-fp8"
    return (root_file(repository, "diffusion_models", f"flux-2-klein-{name}-fp8", size_gb),)


def _klein_4b(name: str) -> dict[str, Files]:
    denoisers = {"fp16": list_denoisers(_KLEIN, 7.75, f"flux-2-klein-{name}"), "fp8": _klein_fp8(name, 4.07)}
    return join_parts(denoisers, _QWEN_4B, _VAE)


FILES = PublishedFiles(
    sets={
        "flux2-dev": {
            "fp8": (
                *list_denoisers(_DEV, 35.46, "flux2_dev_fp8mixed"),
                split_file(_DEV, "text_encoders", "mistral_3_small_flux2_fp8", 18.03),
                *_VAE,
            )
        },
        "flux2-klein-4b": _klein_4b("4b"),
        "flux2-klein-base-4b": _klein_4b("base-4b"),
        "flux2-klein-9b": join_parts({"fp8": _klein_fp8("9b", 9.43)}, _QWEN_8B, _VAE),
        "flux2-klein-base-9b": join_parts({"fp8": _klein_fp8("base-9b", 9.43)}, _QWEN_8B, _VAE),
    },
    more_denoisers={
        "flux2-klein-9b": ("flux-2-klein-9b.safetensors",),
        "flux2-klein-base-9b": ("flux-2-klein-base-9b.safetensors",),
    },
    more_parts={
        # A VAE with a smaller decoder.
        "flux2-dev": ("mistral_3_small_flux2_bf16.safetensors", "full_encoder_small_decoder.safetensors"),
        "flux2-klein-4b": ("qwen_3_4b_fp8_mixed.safetensors",),
        "flux2-klein-9b": ("qwen_3_8b.safetensors",),
    },
)
