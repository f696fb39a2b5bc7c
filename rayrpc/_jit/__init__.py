"""What ``rayrpc.jit.fork`` and ``wait`` are made of: tasks on workers.

- ``tasks``: ``start_task``, behind ``fork``: a worker is chosen, the task packed and sent, run,
  and its result unpacked into the user's Future, with a graph that leads back to the worker.
- ``module_copies``: the modules of tasks on workers, sent again when they were changed.

Invariants:

- Each task that was sent ends its Future once, with the result, the task's error, or that of the
  worker's death.
- A worker runs a task on its module as it was at ``fork``; changes by a task stay on the worker.
"""
