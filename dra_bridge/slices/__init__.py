"""ResourceSlices: what is published, and how it is kept so."""
