"""Profiles of this machine's devices: measured on first use and stored in files."""

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
    """A device's profile and its origin.

    Attributes:
        device: The facts about the device; a profile holds only for equal facts.
        profile: The device's profile.
        path: The file that stores the profile.
        measured: Whether the profile was measured now, or loaded from the file.
    """

    device: dict[str, str]
    profile: Profile
    path: pathlib.Path
    measured: bool


def profile_for(platform_name: str) -> Profile | None:
    """Returns the profile of the first device of a platform.

    Returns:
        The profile, or None if this process has no such device: a program may be
        compiled for another machine.
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
    """Loads a device's profile, or measures and stores it.

    Args:
        device: A device of this process.
        redo: Whether to measure even if a stored profile exists.
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
    """Writes a profile atomically, because other processes may read and write it, too.

    Raises:
        OSError: The file cannot be written.
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
    """Reads a profile; None if the file is unreadable or is for another device."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["device"] != described:
            return None
        return Profile({_key(row): dict(row["seconds"]) for row in record["times"]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _key(row: Any) -> tuple[str, int, int]:
    return row["reduction"], row["rows"], row["elements"]
