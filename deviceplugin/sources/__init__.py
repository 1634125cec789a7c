"""Sources of devices: one for each kind of entry in the config file, and the one that combines them for a resource."""

from deviceplugin.sources.configured import ConfiguredSource, overlaps

__all__ = ["ConfiguredSource", "overlaps"]
