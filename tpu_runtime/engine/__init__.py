"""The engine, its caches and the stages of a generation. May import `loras`, `checkpoints` and what these may."""
