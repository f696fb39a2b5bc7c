"""The scenarios, by name."""

from typing import Any

from simulation.scenario import Scenario
from simulation.scenarios.agents import Agents
from simulation.scenarios.connection import Connection
from simulation.scenarios.rrefs import RRefs
from simulation.scenarios.transport import Transports

__all__ = ["SCENARIOS"]

SCENARIOS: dict[str, Scenario[Any]] = {
    each.name: each for each in (Connection(), Agents(), RRefs(), Transports())
}
