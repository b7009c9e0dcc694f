"""The `comfyui-tpu` command, one file a group of verbs. May import the rooms outside the runtime, and its door."""
