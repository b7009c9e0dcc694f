"""A PyTorch module that stands for what the pack holds on the TPU, for hosts that only manage PyTorch modules."""

import torch


class TPUModels(torch.nn.Module):
    """Named so because ComfyUI's log shows it. It holds no weights: those are on the TPU."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
