"""What is where, who pins it, what goes next; and the tiers that hold the bytes.

The decision core (`manager`, `primary`, `catalog`, `leases`, `slots`, `policies`) does no I/O, reads no clock and
spawns no thread. The tiers themselves (`lmdb`, …) do their I/O on whatever thread calls them.
"""
