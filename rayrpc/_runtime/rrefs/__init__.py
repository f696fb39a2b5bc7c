"""RRefs of one worker.

    handle           RRef, which users hold
    proxy            ``rref.rpc_sync().method()`` and its like
    lazy             the ``Await`` of a value, fetched from its owner
    gradients        ``rref.backward()``
    context          the protocol's table (``_protocol.rref_table``) with a lock, messages, handles
    upkeep           the context's thread: deletions, retransmission
    collected        reports the handles that Python has collected
    unusable         the errors of deleted, lost, failed and foreign RRefs
    value_type       the type of a value, as its owner tells it
    cell             the value at its owner
    home             what a handle needs of its worker; this process's own worker
    handle_protocol  what the context needs of a handle, and a handle of the context
    reference        what proxies, backward passes and lazy values need of a handle

A handle is an owner's (it has a cell) or a user's (it has a fork).  The context alone changes the
table; a collected handle is reported to the context by a queue, never directly.
"""
