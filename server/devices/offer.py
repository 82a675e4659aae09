"""Whether this server can move bytes to and from devices; found out without a driver, which would cost hundreds of MB."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ...cuda.device.device_errors import Cause, advice

__all__ = ["why_not"]

_NVIDIA = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux; Windows' subsystem for it


def why_not(driver: str, devices: tuple[Path, ...] = _NVIDIA) -> str:
    """Returns why devices are not offered, as "cause: text"; empty where they are. ``driver`` is the setting."""
    if driver == "off":
        return "switched_off: the setting devices.driver is off"
    if driver != "auto":
        return ""
    if not any(path.exists() for path in devices):
        return f"{Cause.NO_DRIVER}: {advice(Cause.NO_DRIVER)}"
    try:
        metadata.distribution("cuda-bindings")
    except metadata.PackageNotFoundError:
        return f"{Cause.NO_BINDINGS}: {advice(Cause.NO_BINDINGS)}"
    return ""
