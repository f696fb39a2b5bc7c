"""The protocols of a group: pure state machines and messages, without I/O, threads or torch.

In the order in which a worker meets them:

    rendezvous     an ``init_method`` is parsed to the key of a group and a rank
    origin         who started a process: the owner and the run of what it joins
    group          the state machine of a key: who is in a group with whom
    pending_joins  ... joins that wait until their group is complete
    rebuild        ... and the group again, from its members, when the directory was restarted
    membership     the state machine of a group: who is admitted, who left or died, barriers
    ids            identities of workers, RRefs and forks
    messages       ``Frame``: the request and the reply of a call, and the RRef messages on them
    rref_table     the state machine of RRefs: who holds forks, when a value is released
    rref_entries   ... what it keeps of each RRef, and the effects of events
    rref_link      ... and the order and retransmission of its messages between two workers
    transport      the seams that carry frames and membership: ``Transport`` and ``Directory``
    metrics        what is recorded of a worker, and the seam that records it: ``Sink``

Invariants:

- A state machine takes events and returns messages, effects or decisions; it does no I/O, has no
  lock and reads no clock, so that any order of events can be tested without Ray.
- RRef messages may be delayed, duplicated, reordered or lost; calls are never duplicated.
- An owner keeps an RRef's value as long as it counts a fork, and a parent keeps its fork until the
  owner counts the child's.
- A member is identified by its token, which is never used again; its id and name may be.
- A frame of another session is refused, and so is one of a former member whose id another one has
  now: the numbers of calls begin with the epoch of their worker.
"""
