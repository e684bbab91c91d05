"""Contracts as data: what they are, the space around them, how two differ, and the profiles that collect them."""

from reference.contract import profiles
from reference.contract.base import CONTRACTS, Choice, Contract, Value, describe, fields, from_json, override
from reference.contract.diff import Difference, diff
from reference.contract.profiles import Profile, operator_name, profile
from reference.contract.space import Space, space

__all__ = [
    "CONTRACTS",
    "Choice",
    "Contract",
    "Difference",
    "Profile",
    "Space",
    "Value",
    "describe",
    "diff",
    "fields",
    "from_json",
    "operator_name",
    "override",
    "profile",
    "profiles",
    "space",
]
