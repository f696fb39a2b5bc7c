"""Start workers as Ray actors: the ranks of a script, servers for a notebook, pools for libraries.

The files, in the order in which ``rayrpc run`` (``rayrpc.cli``) meets them:

- ``process``: the shim, which puts rayrpc in place in a script's process and in its children.
- ``program``: what a process runs, described so that a rank on another host can load it.
- ``folder``: the program's folder, for hosts that do not have it.
- ``spawning``: ``spawn`` and its context, in the place of ``torch.multiprocessing``'s: starts the
  ranks of a script.
- ``arguments``: what ranks are called with: shared with those on this node, copied for others.
- ``placement``: which node has room for a worker; what is reserved there.
- ``hosted``: the actor that is a worker; its process runs the main and serves calls.
- ``starting``: makes these actors; their processes have loaded torch (``preloading``) on a cluster
  that forks them.  ``ahead`` starts that cluster beside the script; ``up`` is the command that
  keeps one.
- ``capture``: what a worker's process prints goes into pipes.
- ``collector``: the reader of a node's pipes, here or in an actor there (``output_relay``).
- ``display``: the collected text on this process's terminal, with ``line_prefixes``;
  ``log_files``: the same in files; ``output`` ties all these together.
- ``child_ranks``: ranks that stay processes of torch's; ``children``: the folder on PYTHONPATH by
  which Python processes that a program starts have rayrpc.
- ``interrupt``: the end of a run by Ctrl-C.
- ``looking``: ``rayrpc status`` and ``rayrpc stack``, from the reports of ``_observe``;
  ``run_trace``: ``rayrpc run --trace``.
- ``workers``: workers that only serve, in a group that this process is in, for ``start_workers``;
  ``lifetime``: how long they live; ``restarts``: those that are started again when they die;
  ``detached``: those that outlive their program, and ``rayrpc stop``; ``autoreload``: edited
  modules of a notebook.
- ``cell_hook``: calls of a notebook carry the cell that made them; ``cell_marks``: so does what
  they print, which ``notebook`` shows there.
- ``worker_pool``: workers for one object, in a group of their own beside this process's.
- ``task_workers``: workers for the tasks of ``rayrpc.jit.fork``.

Invariants:

- What a worker has printed is shown, however the worker ends; what it prints faster waits.
- Every worker is an actor named after it, and ends with the process that started it, unless it is
  detached.
- A worker's process has the program's environment before it loads torch; one that is forked with
  torch loaded has that part of it which torch then reads.
- A worker asks Ray for nothing unless the settings, or its caller, say so; a request that no node
  can meet fails at once, by name.
- Functions of a script pickle by reference between its ranks; those of a notebook by value.
- A rank has rayrpc in torch's place exactly if the process that spawned it has.
"""
