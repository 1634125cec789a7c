"""Sources of devices: a class for each kind of device entry in the config file, and a class for a whole resource."""

from deviceplugin.sources.configured import ConfiguredSource, overlaps

__all__ = ["ConfiguredSource", "overlaps"]
