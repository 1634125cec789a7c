"""Sources of devices: one for each kind of entry in the config file, and one that combines a resource's entries."""

from deviceplugin.sources.configured import ConfiguredSource, overlaps

__all__ = ["ConfiguredSource", "overlaps"]
