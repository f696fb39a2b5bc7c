"""Objects to bytes and buffers, and back.

    codec          pickles by reference, else by value; RRefs leave the pickle as forks
    tensors        dense CPU tensors and numpy arrays leave it as protocol-5 buffers
    recording      the slot for the recorder of a message's tensors (distributed autograd)
    devices        device maps: the device of a tensor at the receiver
    remote_errors  exceptions of users' functions

Invariants: encoding copies no tensor; decoding returns tensors that are writable and belong to the
receiver alone; a fork that was announced and not sent is undone, and one that was received and not
unpickled is released.
"""
