"""From a resource of the config file to a source of its devices.

A new kind of entry is a field of `deviceplugin.config`'s `DeviceEntry` and a case in `configured.build_entry`.
"""

from deviceplugin.sources.configured import ConfiguredSource, build, overlaps

__all__ = ["ConfiguredSource", "build", "overlaps"]
