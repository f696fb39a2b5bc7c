"""RRefs of one worker.

    handle           RRef, which users hold
    proxy            ``rref.rpc_sync().method()`` and its like
    lazy             the ``Await`` of a value, fetched from its owner
    gradients        ``rref.backward()``
    context          the protocol's table (``_protocol.rref_table``) with a lock, messages, handles
    upkeep           the context's thread: when deletions are sent, and messages sent again
    listing          reports of a worker's RRefs, and leaks
    creation_site    where RRefs were made, for these and for messages
    collected        reports the handles that Python has collected
    unusable         the errors of deleted, lost, failed and foreign RRefs
    value_type       the owner's answer to a request for the type of a value; ``handle`` requests
    cell             the value at its owner
    home             what a handle needs of its worker; this process's own worker
    handle_protocol  what the context needs of a handle, and a handle of the context
    reference        what proxies, backward passes and lazy values need of a handle

A handle is an owner's (it has a cell) or a user's (it has a fork).  The context alone changes the
table; a collected handle is reported to the context by a queue, never directly.
"""
