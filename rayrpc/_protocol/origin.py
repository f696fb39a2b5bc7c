"""Who started a process: the owner of the groups that it joins, and the run that it is part of."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Origin"]


class Origin(NamedTuple):
    """Who started a process.

    The ranks that one program starts, and those that they start, have its run.  They also have
    its user, host, program and pid, on whatever node they are.

    Args:
        user (str): who started the program; empty if that is not known, as for all fields.
        host (str): name of the host on which it was started.
        loopback (str): identity of that host's loopback network.
        program (str): path of the script.
        pid (int): id of the program's process.
        run (str): identity of the program's processes.
        launched (bool): a process of the program started this one; else a user did, by hand.
        ranks (int): how many processes its starter has started, this one included; 1 by hand.
        started (int): how many processes it has started itself.
    """

    user: str = ""
    host: str = ""
    loopback: str = ""
    program: str = ""
    pid: int = 0
    run: str = ""
    launched: bool = False
    ranks: int = 1
    started: int = 0

    @property
    def is_by_hand(self) -> bool:
        """Tell whether a user started the process by hand, and it has started none itself."""
        return not self.launched and self.started == 0

    def __str__(self) -> str:
        return (
            f"user {self.user!r}, program {self.program!r}, host {self.host!r}, pid {self.pid}"
            if self.user
            else "an unknown program"
        )
