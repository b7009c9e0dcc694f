"""LoRA files and their kin: what one changes in a network, and merging it on the chips. May import `checkpoints`."""
