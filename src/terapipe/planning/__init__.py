"""Plans, layouts, orders, cost models, memory models and the exact solver for slices. No torch here."""

from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import Cost, LinkBehavior, Memory, StageSpec, stage_specs
from terapipe.planning.device import Device, Link
from terapipe.planning.documents import DocumentCosts, DocumentPlanner
from terapipe.planning.hardware import HOSTS, Cluster, Host
from terapipe.planning.layout import Layout, balance, split_layers
from terapipe.planning.memory import ShapeMemory, parse_bytes
from terapipe.planning.order import ORDERS, InFlight, Order, register
from terapipe.planning.profile import FittedCost, Profile, Sample, Transfer
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan, Slice
from terapipe.planning.solver import Array, Cuts, SliceCost, solve, solve_table

__all__ = [
    "HOSTS",
    "ORDERS",
    "AnalyticCost",
    "Array",
    "Cluster",
    "Cost",
    "Cuts",
    "Device",
    "DocumentCosts",
    "DocumentPlanner",
    "FittedCost",
    "Host",
    "InFlight",
    "Layout",
    "Link",
    "LinkBehavior",
    "Memory",
    "Order",
    "Plan",
    "Profile",
    "Recompute",
    "Sample",
    "ShapeMemory",
    "Slice",
    "SliceCost",
    "StageSpec",
    "Transfer",
    "balance",
    "parse_bytes",
    "register",
    "solve",
    "solve_table",
    "split_layers",
    "stage_specs",
]
