"""A PyTorch module that represents the pack's models on the TPU, for applications that only manage PyTorch modules."""

import torch


class TPUModels(torch.nn.Module):
    """A module without weights, which are on the TPU. ComfyUI's log shows its name."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
