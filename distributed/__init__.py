"""Work that crosses a process or a machine: transport, engines of several hosts, remote stages and batches.

Its packages import each other as the layers of the runtime do; `engine` uses `rpc` and `multihost`.
"""
