"""Connections between the workers: calls in some ten microseconds, without Ray in between.

The files, in the order in which a call meets them:

- ``transport``: chooses the ``route`` of a call: a connection, or the fallback transport;
- ``unconnected_calls``: calls that go by the latter, or fail;
- ``address``: what a member's record says of its worker's listeners;
- ``dialing``: connects to a peer, and authenticates;
- ``connection`` and ``connection_call``: the caller's end: sends requests, completes the calls;
- ``connection_owner``: what that needs of the transport;
- ``reply_reader``: reads the replies there, in a thread that ``reader_schedule`` chooses (pure);
- ``stream``: one end of a connection, of the caller or the callee: frames in and out;
- ``shared_memory`` and ``mapped_segments``: segments for large buffers, between processes of one
  node: the sender's half, and the receiver's;
- ``descriptors``: hands those of segments over;
- ``wire`` and ``message_reader``: the format of messages, and their reader;
- ``received_memory``: of large buffers from other nodes;
- ``send_queue``: writes messages in batches, without blocking the sender for long;
- ``outgoing``: such a message, and what is left of several when some bytes are written;
- ``traffic``: counts the bytes that connections send;
- ``silence``: closes connections to hosts that do not answer;
- ``tls``: encrypts connections between nodes;
- ``peer_process``: the process at the other end of a UNIX socket: its id, what it has read;
- ``listening``: where the callee listens for other nodes, and the address that it announces;
- ``acceptor`` and ``auth``: accept and authenticate connections, at the callee;
- ``idle_connections``: wait, there, without a thread each until something arrives;
- ``server``: the callee's listeners, and all of its connections;
- ``server_connection``: the callee's end of one: reads requests, serves them, sends the replies;
- ``bulk_replies``: large ones, by the connection that the peer has opened for them;
- ``after_fork``: what a forked child does with the connections of its parent.

Invariants:

- A connection is authenticated in both directions before anything from it is unpickled.
- A request of which one byte was sent is never sent again; one of which none was goes by the
  fallback.  So no function runs twice.
- A broken connection does not imply that the peer died: the directory decides that, and on the
  same node the end of the peer's process.  Until then the calls that were sent on it wait; without
  such a report they end with ``CallLostError``.
- Replies that arrived before a peer left or died are read; a worker that leaves replies first.
- One thread at a time reads an end of a connection, and none is kept for one that is idle.  A
  thread that reads and then blocks hands over first.
- The two connections to a peer on another node, the second for large messages, are lost together.
- What the program may write to after a call has returned was sent or copied before.
- A segment of shared memory is written again only after its receiver has released it, and never
  if a child of the receiver may read it.
"""
