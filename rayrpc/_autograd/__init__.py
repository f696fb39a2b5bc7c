"""Distributed autograd: contexts, and backward passes through the calls that were made in them.

Torch runs a backward pass within one process. Here the graphs of several workers are connected by
the messages between them, in a context that a program opens; a pass computes gradients along all
of it, and leaves them in the context.

A call in a context meets, in this order:

- ``hook``: ``GradContexts``, the ``Hook`` on each call and reply. It opens, finds and releases the
  worker's contexts, and sends the ids of context and message along.
- ``current_context``: the context that a thread is in, and calls and callbacks in one, or in none.
- ``functions``: a ``Recorder`` collects the tensors of the message that is encoded, for the
  message's send function; the receiver attaches them to a receive function.
- ``context``: ``DistAutogradContext``, one worker's share of a context: its messages with these
  functions (``context_messages``), its parts of passes (``passes``), and gradients.

A backward pass then meets:

- ``leader``: ``run_backward``, and the part of the worker that leads the pass.
- ``explore``: which messages the roots depend on.
- ``participant``: every worker's part, with its states.
- ``part_calls``: the calls between parts, and their replies.
- ``graph``: one worker's part of the graph, run by torch's engine (``engine``) in stages, along
  the ``edges`` between its nodes.
- ``whole_run``: the rest of a part in one run of the engine, where stages would share nodes.
- ``accumulate``: gradients of leaves, added up and with their hooks run.

Invariants:

- Each node runs once, with its whole gradient, as in a local pass; so do its hooks.
- A worker that no message of the roots leads to takes no part; each that takes part is begun once.
- A message's gradients are sent once, when all that leads to it has run.
- Each part ends exactly once, in DONE or FAILED, and the leader learns of it by a reply or a call.
- ``.grad`` of the user's tensors stays as it is.
- A context ends on all workers that were called in it, also where a worker dies or a call is late.
- The calls of a pass run without a context: they record no tensors.
- A context is of one group. The calls of its passes are made by the agent in that group, and served
  by the contexts of the agent that they reach (``serving_contexts``).
"""
