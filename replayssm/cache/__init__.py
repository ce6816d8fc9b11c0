"""Slots and their lifecycle: what belongs to a request of a decoder with recurrent layers (``docs/cache.md``)."""

from replayssm.cache.exact import ExactMamba2Buffers, ExactMamba2Layer
from replayssm.cache.gdn import GDNBuffers, GDNLayer
from replayssm.cache.mamba2 import Mamba2Buffers, Mamba2Layer
from replayssm.cache.plan import SlotBytes, StateTraffic, choose_window, slot_bytes, snapshot_bytes, state_traffic
from replayssm.cache.pool import CapacityError, ReplayPool
from replayssm.cache.snapshot import restore, snapshot

__all__ = [
    "CapacityError",
    "ExactMamba2Buffers",
    "ExactMamba2Layer",
    "GDNBuffers",
    "GDNLayer",
    "Mamba2Buffers",
    "Mamba2Layer",
    "ReplayPool",
    "SlotBytes",
    "StateTraffic",
    "choose_window",
    "restore",
    "slot_bytes",
    "snapshot",
    "snapshot_bytes",
    "state_traffic",
]
