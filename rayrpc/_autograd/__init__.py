"""Distributed autograd: contexts, and backward passes through the calls that were made in them.

Torch runs a backward pass within one process. Here the graphs of several workers are connected by
the messages between them, in a context that a program opens; a pass computes gradients through all
of these graphs, and stores them in the context.

A call in a context meets, in this order:

- ``hook``: ``GradContexts``, the ``Hook`` on each call and reply. It opens, finds and releases the
  worker's contexts, and adds the ids of the context and the message to each call.
- ``current_context``: the context that a thread is in; calls and callbacks in that context, or in
  none.
- ``functions``: a ``Recorder`` collects the tensors of the message that is encoded, for the
  message's send function; the receiver attaches them to a receive function.
- ``context``: ``DistAutogradContext``, one worker's share of a context: its messages with their
  send and receive functions (``context_messages``), its parts of passes (``passes``), and
  gradients.

A backward pass then goes through:

- ``leader``: ``run_backward``, and the part of the worker that leads the pass.
- ``explore``: finds the messages that the roots depend on.
- ``participant``: every worker's part, with its states.
- ``part_calls``: the calls between parts, and their replies.
- ``graph``: one worker's part of the graph, run by torch's engine (``engine``) in stages, along
  the ``edges`` between its nodes.
- ``whole_run``: the rest of a part in one run of the engine, where two stages would share a node.
- ``accumulate``: adds up the gradients of leaves, and has the leaves' hooks run.

Invariants:

- Each node runs once, with its whole gradient, as in a local pass; so do its hooks.
- Beside the leader, only workers take part that sent a tensor that the roots depend on. Each part
  begins once.
- A worker sends a message's gradients once, when all nodes that lead to the message have run.
- Each part ends exactly once, in DONE or FAILED, and a reply or a call reports this to the leader.
- A pass does not change ``.grad`` of the user's tensors.
- Every worker that was called in a context releases it, also if a worker dies or a call is late.
- The calls of a pass run without a context: they record no tensors.
- A context belongs to one group. That group's agent makes the calls of its passes; the callee's
  agent in the group serves them with its own contexts (``serving_contexts``).
"""
