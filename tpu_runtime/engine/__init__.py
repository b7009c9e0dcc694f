"""One generation at work: the engine, its caches and stages. May import `loras`, `checkpoints` and what these may."""
