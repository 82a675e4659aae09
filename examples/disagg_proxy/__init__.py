"""A proxy in front of engines that prefill and engines that decode, with turns that go back and forth between them.

What is decided is apart from what is done: ``turns``, ``transfer``, ``conversations``, ``events`` and ``fleet`` know no socket and
no clock; ``engines``, ``exchange``, ``watch``, ``app`` and ``program`` do the rest. It uses nothing of kvtier: what it says to
engines are the field's own words, and a copy of this folder runs anywhere.
"""
