"""The API of ``machin.parallel`` on rayrpc; import its modules.

What it is for: programs of machin, and programs that want a pool, a parameter server or a queue on
a Ray cluster, without RPC of their own.  Its modules, from the ground up:

- ``pickle``: objects to bytes, tensors by value or by reference.
- ``queue``: ``SimpleQueue``, between any processes of the cluster.
- ``pool``: ``Pool``, ``CtxPool``, ``ThreadPool``..., on Ray workers or threads.
- ``distributed``: ``World``, ``RpcGroup`` and ``CollectiveGroup``, on RPC and process groups.
- ``server``: servers of values, models and gradients, on an ``RpcGroup``.
- ``assigner``: models to devices, of a process or of the workers of a group.

In ``_replaceable`` a package stands for a module of machin, whose names programs replace.

Invariants:

- Names, arguments and defaults are those of machin; what has no meaning here is accepted.
- No module needs another than those above it in this list.
- Importing a module connects to nothing and changes nothing.
"""
