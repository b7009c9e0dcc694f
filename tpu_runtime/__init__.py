"""Everything between a node and the chips: models, checkpoints, programs, the engine, and what describes them.

`api` is the public API. Modules next to it (progress, precision, units, media) may be imported by every package; they
import `attention` and `sharding`.
"""
