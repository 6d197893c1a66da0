"""The facts that determine how fast a device's kernels run."""

import importlib.metadata
import os
import pathlib
import platform

from dafjax._native import _library
from dafjax._native._cuda_status import cuda_status
from dafjax._typing import Device


# Jetsons write their power mode to this file.
_POWER_MODE = pathlib.Path("/var/lib/nvpmodel/status")


def describe(device: Device) -> dict[str, str]:
    """Returns the facts that kernel times depend on: hardware, driver, versions."""
    facts = {
        "dafjax": importlib.metadata.version("dafjax"),
        "platform": device.platform,
        "kind": device.device_kind,
        "power mode": power_mode(),
    }
    if device.platform == "cpu":
        facts["kind"] = processor()
        facts["instructions"] = _library.library_status().instruction_set or ""
        facts["threads"] = str(os.cpu_count())
        return facts
    status = cuda_status()
    facts["capability"] = str(getattr(device, "compute_capability", ""))
    facts["cores"] = str(getattr(device, "core_count", ""))
    facts["driver"] = str(status.driver_version)
    facts["built for"] = " ".join(status.architectures)
    return facts


def processor() -> str:
    """Returns the name of the machine's processor."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        line.partition(":")[2] for line in text.splitlines() if "model name" in line
    ]
    return names[0].strip() if names else platform.machine()


def power_mode() -> str:
    """Returns a Jetson's power mode, as the system records it; else an empty text."""
    try:
        return _POWER_MODE.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
