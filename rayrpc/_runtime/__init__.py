"""One worker: its calls, its RRefs and its group.  It imports neither transports nor Ray.

    agent               wires the parts of a worker; notifies them of members that come and go
    worker              the parts that the caller and the callee share
    router              where the frames of a worker go: to a peer, to itself, nowhere
    inspection          asks members what they do
    members             the group's members, present and former
    observers           a program's functions that are called when members join and leave
    invocation          what a call runs, and the names of that in messages
    caller              a call at its caller: encode, send, wait or be called back, decode
    request_encoder     ... to a request frame, with the number of the call
    reply_decoder       ... its result, of a reply frame
    timeouts            ... its timeout in seconds, of what users give
    open_call           ... that is under way, and completes by callback or by its timeout
    started_call        ... that is waited for later, or abandoned
    waiting_call        ... that a thread waits for, until its timeout
    call_errors         ... the errors for timeouts, cancelling and shutdown
    current_call        ... for whose function a thread runs
    cancelling          ... that is cancelled, at both ends; interrupts its function at the callee
    interrupting_calls  calls of finalizers and of handlers of signals, amid code of this package
    serialization       objects to bytes and buffers
    callee              a call at its callee: decode, run, wait for its Future or coroutine, encode
    served_call         ... its record while it is under way
    reply_encoder       ... its outcome, to a reply frame
    running             functions of Python and TorchScript
    operators           calls of torch's operators, by their schemas
    served_streams      calls that each return one value of an iterator here
    iteration           its steps, in order and one at a time
    coroutines          event loops for async functions
    hooks               what accompanies calls: profiling, distributed autograd
    rrefs               handles, proxies and values of RRefs
    objects             objects of the cluster's store, as arguments and as copies of values
    awaitable           values that are computed when they are first used
    user_api            the functions of the layers above that RRefs call
    current             the agent of this process
    native_names        torch's native functions on it
    torch_names         private functions of torch's module, which ``api`` has under torch's names
    main_identity       whether two processes run the same program, and share ``__main__``
    all_gather          objects of all workers
    quiescence          graceful shutdown: waits until no calls are under way
    gil_waits           how long serving threads wait for Python's lock
    noted_waits         what threads wait for at other workers, apart from calls

A member's death: ``_transports`` has the directory, or the end of a peer's process, report it; the
agent has the caller fail its calls, the RRefs count without it, and the hooks know.

Invariants: every call ends once, with a value or an error; users' functions run in the thread that
received the call or in ``ThreadCache``, never in a thread of Ray; whatever may block releases its
reader first (``_concurrency.reader``).
"""
