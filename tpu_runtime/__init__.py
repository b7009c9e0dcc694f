"""Everything between a node and the chips: models, checkpoints, programs, the engine, and what describes them.

`pipeline` is the public door. The root holds it and leaves that any room may use (spec, progress, precision, units,
cache, media); they import `attention` and `sharding`.
"""
