"""The line between machines: records as messages, one payload format, one handshake, one heartbeat.

Hosts of an engine, stages elsewhere and `serve` speak it. May import `checkpoints` and what these may.
"""
