"""The `comfyui-tpu` command, one file per group of verbs. May import all packages."""
