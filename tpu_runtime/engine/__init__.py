"""One generation at work: the engine, its caches and stages. May import `checkpoints` and what that may."""
