"""TorchScript code that calls RPC, loaded when a program first compiles something.

Compiled operators of RPC need torch's native agent, which rayrpc does not have.  So a compiled
function or method whose graph has such operators, or values of type ``RRef``, runs the Python
code that it was compiled from, after the checks that TorchScript makes of a call.  All other
compiled code stays compiled.

From a call to the Python code:
    compiled        the classes of functions and methods while they may call RPC
    graphs          whether a graph calls RPC, or an interface
    signature       the checks: number, names, defaults and types, by the schema
    originals       the Python code of a function or method, which runs
    source          the same for methods that were loaded: their TorchScript source, run as Python

Script modules:
    modules         their Python wrappers, and attributes that hold RRefs
    archives        ``torch.jit.save`` and ``load`` of modules with such attributes
    remote_modules  what of a ``RemoteModule`` with an interface is compiled

    patches         what of torch is replaced, and restored by ``uninstall()``

``rayrpc.compat`` loads the package; nothing else refers to it.
"""
