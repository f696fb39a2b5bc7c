"""Threads, deadlines and completions: what the layers above need to run at the same time.

Nothing here knows torch, Ray or RPC.  In the order in which a call meets them:

    outcome           ``Value | Error``: how a call, a function or a backward pass ended
    promise           one value that is set once: the core of pending calls and of RRefs' cells
    deadlines         ``Deadline`` of one wait; ``DeadlineThread`` for the calls with callbacks
    reader            the hand-over of a connection's reader to another thread
    latency_profile   which functions are fast enough to run in the reading thread
    threads           threads on demand, and slots that limit how many functions run at a time
    notices           what a program waits for, told to an interactive user
    frames            where other threads are, read while they run
    clocks            how the monotonic clocks of hosts differ
    waiting           ``Notifier``, ``Event``: waits that Ctrl-C ends without a trace

Invariants:

- An error is a value until ``unwrap`` raises a copy of it; the original keeps no frames alive.
- No lock is held while a callback, a task or a user's function runs.
- A task that blocks never blocks the tasks queued after it.
- All threads are daemons and end with ``close()``.
"""
