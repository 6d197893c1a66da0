"""Profiles of this machine's devices: measured on first use, and kept in files."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import tempfile
import warnings
from typing import Any

import jax
import platformdirs

from dafjax._native._device_facts import describe
from dafjax._native._reduction_profile import Profile, measure
from dafjax._native._reduction_timing import time_reductions
from dafjax._typing import Device


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A device's profile, and where it is from.

    Attributes:
        device: What is known of the device; a profile is of one with the same.
        profile: Its profile.
        path: The file that keeps it.
        measured: Whether it was measured now.
    """

    device: dict[str, str]
    profile: Profile
    path: pathlib.Path
    measured: bool


def profile_for(platform_name: str) -> Profile | None:
    """Returns the profile of the first device of a platform.

    Returns:
        None if there is no such device: a program may be compiled for another machine.
    """
    try:
        device = jax.local_devices(backend=platform_name)[0]
    except RuntimeError:
        return None
    return _profile_of(device)


@functools.cache
def _profile_of(device: Device) -> Profile:
    return tune_device(device).profile


def tune_device(device: Device, *, redo: bool = False) -> Tuning:
    """Loads a device's profile, or measures and keeps it.

    Args:
        device: A device of this process.
        redo: Whether it is measured in any case.
    """
    described = describe(device)
    path = _path_of(described)
    profile = None if redo else load(path, described)
    if profile is not None:
        return Tuning(described, profile, path, measured=False)
    profile = measure(functools.partial(time_reductions, device))
    try:
        save(path, described, profile)
    except OSError as error:
        warnings.warn(
            f"The profile of {device.device_kind} cannot be kept in `{path}`: {error}. "
            "Every process measures it anew, in some 0.3 s. Make the folder writable, "
            "or set XDG_CACHE_HOME to one that is.",
            stacklevel=2,
        )
    return Tuning(described, profile, path, measured=True)


def _path_of(described: dict[str, str]) -> pathlib.Path:
    text = json.dumps(described, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return platformdirs.user_cache_path("dafjax") / f"reductions-{name}.json"


def save(path: pathlib.Path, described: dict[str, str], profile: Profile) -> None:
    """Writes a profile, at once or not at all: others may read and write it, too.

    Raises:
        OSError: It cannot be written.
    """
    record = {
        "device": described,
        "times": [
            {
                "reduction": key[0],
                "rows": key[1],
                "elements": key[2],
                "seconds": seconds,
            }
            for key, seconds in profile.times.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=1)
    os.replace(name, path)


def load(path: pathlib.Path, described: dict[str, str]) -> Profile | None:
    """Reads a profile; None if there is none of this device that can be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["device"] != described:
            return None
        return Profile({_key(row): dict(row["seconds"]) for row in record["times"]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _key(row: Any) -> tuple[str, int, int]:
    return row["reduction"], row["rows"], row["elements"]
