"""Observation of calls, by hooks on their path; no other code asks whether it is on.

- ``profiler``: ``ProfilerHook``, calls as events of torch's legacy autograd profiler.
- ``legacy_profile``: what callees do, in the profiles of that.

Invariant: a call that nothing observes pays for one look at the hook, ``Hook.wants``.
"""
