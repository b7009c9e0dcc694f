"""Previews while sampling, through ComfyUI's own previewers: the user's setting, TAESD files and animations apply.

A model with a light decoder of ours instead of its VAE provides its own preview image.
"""

import comfy.latent_formats
import latent_preview

from ...tpu_runtime import media
from ...tpu_runtime.progress import Preview


class Previewer:
    """The previews of one run of a node."""

    def __init__(self) -> None:
        self._previewers: dict[str, latent_preview.LatentPreviewer | None] = {}

    def image(self, preview: Preview) -> tuple | None:
        """Return a preview in the form that `ProgressBar` accepts; None if the user has disabled previews."""
        if latent_preview.args.preview_method == latent_preview.LatentPreviewMethod.NoPreviews:
            return None
        if preview.picture is not None:
            image = latent_preview.preview_to_image(preview.picture() * 2.0 - 1.0)
            return "JPEG", image, latent_preview.MAX_PREVIEW_RESOLUTION
        sample = preview.sample()
        previewer = self._previewer(preview.latent_format, sample.device)
        if previewer is None:
            # ComfyUI has no colours for this latent space (CogVideoX).
            previewer = latent_preview.Latent2RGBPreviewer(*media.fit_latent_colours(sample))
        return previewer.decode_latent_to_preview_image("JPEG", sample)

    def _previewer(self, latent_format: str, device: object) -> "latent_preview.LatentPreviewer | None":
        if latent_format not in self._previewers:
            known = getattr(comfy.latent_formats, latent_format, None)
            # Looked up in its module at each run, because packs that animate previews replace it.
            self._previewers[latent_format] = latent_preview.get_previewer(device, known()) if known else None
        return self._previewers[latent_format]
