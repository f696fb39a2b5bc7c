"""Connections between the workers: calls in some ten microseconds, without Ray in between.

The files, in the order in which a call meets them:

- ``transport``: chooses the ``route`` of a call: a connection, or the fallback transport;
- ``unconnected_calls``: calls that go by the fallback transport, or fail;
- ``address``: the addresses in a member's record, at which peers reach it;
- ``dialing``: connects to a peer, and authenticates;
- ``connection`` and ``connection_call``: the caller's end: sends requests, completes the calls;
- ``connection_owner``: what the caller's end needs of the transport;
- ``reply_reader``: reads the replies at the caller's end; ``reader_schedule`` (pure) chooses the
  thread;
- ``stream``: one end of a connection, of the caller or the callee: frames in and out;
- ``shared_memory`` and ``mapped_segments``: segments for large buffers, between processes of one
  node: the sender's half, and the receiver's;
- ``descriptors``: sends and receives the descriptors of segments;
- ``wire`` and ``message_reader``: the format of messages, and their reader;
- ``received_memory``: memory for large buffers from other nodes;
- ``send_queue``: writes messages in batches, without blocking the sender for long;
- ``outgoing``: a message to write, and what is left of messages after a partial write;
- ``traffic``: counts the bytes that connections send;
- ``silence``: closes connections to hosts that acknowledge nothing;
- ``tls``: encrypts connections between nodes;
- ``peer_process``: the process at the other end of a UNIX socket: its id, what it has read, whether
  it has ended;
- ``listening``: where the callee listens for other nodes, and the address that it announces;
- ``acceptor``: accepts connections at the callee; ``auth``: the handshake, at both ends;
- ``idle_connections``: the callee's idle connections, for which one thread waits;
- ``server``: the callee's listeners, and all of its connections;
- ``server_connection``: the callee's end of a connection: reads requests, serves them, replies;
- ``bulk_replies``: sends large replies by the connection that the peer has opened for them;
- ``after_fork``: closes, in a forked child, the connections of its parent.

Invariants:

- A connection is authenticated in both directions before anything from it is unpickled.
- A request is not sent again once a byte of it was sent.  If none was sent when the connection
  breaks, the request goes by the fallback.  So no function runs twice.
- A broken connection does not imply that the peer died: the directory reports that, or, on the same
  node, the end of the peer's process shows it.  The calls that were sent on the connection wait for
  this; if it does not come, they fail with ``CallLostError``.
- The caller reads replies that arrived before a peer left or died.  A worker that leaves sends its
  replies first.
- One thread at a time reads an end of a connection, and an idle connection keeps no thread.  A
  reader hands over before it blocks.
- The two connections to a peer on another node, the second for large messages, are lost together.
- A call sends or copies the program's buffers before it returns: the program may write to them.
- A segment of shared memory is written again only after its receiver has released it, and never
  if a child of the receiver may read it.
"""
