"""Copies between engines' device memory and the region, made by one worker process per device."""
