"""Connections between the workers: calls in some ten microseconds, without Ray in between.

The files, in the order in which a call meets them:

- ``transport``: chooses the route of a call: a connection, or the fallback transport;
- ``address``: what a member's record says of its worker's listeners;
- ``connection``: the caller's end: sends requests, completes the calls;
- ``reader_schedule``: decides which thread reads there (pure);
- ``stream``: one end of a connection, of the caller or the callee: frames in and out;
- ``shared_memory``: segments for large buffers, between processes of one node;
- ``wire``: the format of messages, and their reader;
- ``send_queue``: writes messages in batches, without blocking the sender for long;
- ``acceptor`` and ``auth``: accept and authenticate connections, at the callee;
- ``server``: the callee's end: reads requests, serves them, sends the replies.

Invariants:

- A connection is authenticated in both directions before anything from it is unpickled.
- A request of which one byte was sent is never sent again; one of which none was goes by the
  fallback.  So no function runs twice.
- A broken connection does not imply that the peer died: the directory decides that.  Until then
  the calls that were sent on it wait; without such a report they end with ``CallLostError``.
- One thread at a time reads an end of a connection, and none is kept for one that is idle at the
  caller.  A thread that reads and then blocks hands over first.
- A segment of shared memory is written again only after its receiver has released it.
"""
