"""Which blocks the tiers of a server hold: `EventStream` reads the server's events.

`describe_blocks` tells the server the tokens of blocks, for events.
"""

from ...protos.wire.block_contents import BlockContent
from .follower import BlockFollower, HeldChange
from .stream import EventStream, describe_blocks

__all__ = ["BlockContent", "BlockFollower", "EventStream", "HeldChange", "describe_blocks"]
