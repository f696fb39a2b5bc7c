"""The Ray transport: calls by Ray actors, and membership by a directory actor.

In the order in which a worker meets them:

    cluster            connects this process to its Ray cluster, the local one if none is named
    local_lease        the lease of the local cluster; keeps it without one (``rayrpc up``)
    auth_token         Ray's authentication by token: the user's token, clusters that require one
    local_cluster      the process that starts and ends a local cluster
    node_start         starts the nodes of the local cluster in less time
    start_daemon       is the program that runs Ray's daemons, beside JupyterLab
    worker_forks       has Ray's workers forked: by ``fork_server``, a process that has loaded what
                       they need, which ``start_worker`` asks in the place of Ray's program
    forked_children    the children that a connected process forks, without a client of Ray
    ray_api            Ray's functions, which are errors where Ray has ended
    raylet_watch       ends a process of Ray with its node's raylet
    directory          the directory actor of a group
    directory_answers  what the directory answers its members, and how often
    applied_versions   which version of the group each member has applied
    endpoint_watch     notifies the directory when a member leaves or dies
    directory_start    starts the directory on the head node, or finds it
    directory_client   a member's side of the directory: ``RayDirectory``
    group_record       what the directory knows of the group, should it be restarted
    host_monitor       finds the hosts that do not answer, for the directory
    endpoint           addresses, the wire form, the endpoint of a hosted worker
    relay              the relay actor: the endpoint of an attached process
    relay_client       an attached process's side of its relay: polls, serves, sends results
    transport          ``RayTransport``: calls peers' endpoints, serves this worker's own
    actor_exit         has a worker leave its group before Ray ends the actor that it runs in
    objects            Ray's object store, and objects that complete later
    inspection         asks the workers of all groups what they do, from a process in none
    trace_collector    the actor that takes what the workers of a traced run have recorded
    ray_metrics        records a worker's metrics as Ray's
    ray_errors         Ray's errors as errors of rayrpc; the causes of deaths

    caller ──handle(wire)──> endpoint of the callee ──> callee
    caller <──────────── its return value, or a later deliver(call_id, wire)

Invariants:

- Each worker has exactly one actor endpoint, which dies with it: the worker's own actor, or a relay
  that its process owns, and that Ray starts again if it dies alone.
- The directory, the relays and the actors of pending objects never import torch; the modules that
  they load hold to it.
- An address has names, never handles: a handle can be unpickled only while its program runs.
- No call holds a thread while it waits for another one: its reply is deferred.
- Ray's errors are translated here; the layers above see those of ``rayrpc.errors``.  Errors of
  objects stay Ray's own: programs that use Ray know them.
"""
