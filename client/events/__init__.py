"""Which blocks the tiers of a server hold: `EventStream` reads the server's events."""

from .follower import BlockFollower, HeldChange
from .stream import EventStream

__all__ = ["BlockFollower", "EventStream", "HeldChange"]
