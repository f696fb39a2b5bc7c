"""Objects to bytes and buffers, and back.

    codec            pickles by reference; by value what the receiver cannot import: lambdas,
                     functions of notebooks and of another ``__main__``
    reducers         what instances of a class are pickled to
    sessions         RRefs and ObjectRefs leave a pickle, and come back to it
    tensors          dense CPU tensors and numpy arrays leave it as protocol-5 buffers
    recording        the slot for the recorder of a message's tensors (distributed autograd)
    devices          device maps: the device of a tensor at the receiver
    shared_globals   functions that go by value share the globals of their program
    global_versions  which of these have changed since they were sent
    contents         ... by digests of what these contain
    function_parts   what else such a function consists of
    remote_errors    exceptions of users' functions
    stored           values and errors as objects of the cluster's store

Invariants: encoding copies no tensor; decoding returns tensors that are writable and belong to the
receiver alone; a fork that was announced and not sent is undone, and one that was received and not
unpickled is released.
"""
