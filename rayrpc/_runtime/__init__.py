"""The parts of a running worker: codec, caller, callee, RRef table, membership, agent."""
