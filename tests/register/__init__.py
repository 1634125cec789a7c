"""The register, and whole agents on the fake node: no configuration, list or lost file gives a device twice."""
