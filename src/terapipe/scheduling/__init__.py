"""The order of work: actions, orders, schedules, their validation and simulation. No torch here."""

from terapipe.scheduling.actions import Action, Op, Schedule, dependencies
from terapipe.scheduling.footprint import curves, peaks
from terapipe.scheduling.idle import Idle, idle_by_cause
from terapipe.scheduling.orders import computations, schedule
from terapipe.scheduling.simulator import makespan, simulate
from terapipe.scheduling.timeline import Event, Timeline
from terapipe.scheduling.validated import validated_actions
from terapipe.scheduling.validation import validate

__all__ = [
    "Action",
    "Event",
    "Idle",
    "Op",
    "Schedule",
    "Timeline",
    "computations",
    "curves",
    "dependencies",
    "idle_by_cause",
    "makespan",
    "peaks",
    "schedule",
    "simulate",
    "validate",
    "validated_actions",
]
