"""Sources of devices: one class for each kind of entry in the config file, and one for all entries of a resource."""

from deviceplugin.sources.configured import ConfiguredSource, overlaps

__all__ = ["ConfiguredSource", "overlaps"]
