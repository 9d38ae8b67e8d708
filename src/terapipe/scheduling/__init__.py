"""The order of work: actions, orders, schedules, their validation and simulation. No torch here."""

from terapipe.scheduling.actions import Action, Op, Schedule, dependencies
from terapipe.scheduling.footprint import curves, peaks
from terapipe.scheduling.orders import computations, schedule
from terapipe.scheduling.simulator import makespan, program, simulate
from terapipe.scheduling.timeline import Event, Idle, Timeline, idle_by_cause
from terapipe.scheduling.validation import validate, validated_actions

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
    "program",
    "schedule",
    "simulate",
    "validate",
    "validated_actions",
]
