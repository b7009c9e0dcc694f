"""LoRA files and related formats: their changes to a network, merged on the chips. May import `checkpoints`."""
