"""The `comfyui-tpu` command, one file a group of verbs. May import everything."""
