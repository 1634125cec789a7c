"""Says of a cluster, or of dumps of it, what a migration from limits to claims runs into; changes nothing."""
