"""Observation of calls, and of what hangs.

By hooks on the path of calls; no other code asks whether they are on:

- ``profiler``: ``ProfilerHook``, calls as events of torch's legacy autograd profiler.
- ``legacy_profile``: what callees do, in the profiles of that.
- ``kineto``: ``KinetoHook``, calls as events of ``torch.profiler``.
- ``server_profile``: a profile of all calls that a worker serves.
- ``trace``: when each call is made, received, run and answered, while ``rpc.profile`` records.
- ``call_log``: a line in the log for each call, at both ends.
- ``trace_file``: one picture of what all workers have recorded (pure).

By looking at a worker while it works, or hangs (``rayrpc status``, ``rayrpc stack``):

- ``report``: ``Inspector`` answers INSPECT frames with what its worker does.
- ``stacks``: where users' code is.
- ``waits``: the graph of who waits for whom, from the reports of a group (pure).
- ``group_status``: the reports of a group, as text, HTML and data; ``tables`` lays them out.
- ``rref_list``: the RRefs of a group (``rpc.rrefs``).
- ``metrics``: counts and times of calls, recorded by Ray's metrics every few seconds.
- ``slow_calls``: logs calls that wait for long, with what the callee reports of them.

Invariants: a call that nothing observes pays for one look at the hook, ``Hook.wants``.  A report
takes no slot, so that it comes also where all are taken.  ``stacks``, ``waits``,
``group_status`` and ``trace_file`` load no torch.
"""
