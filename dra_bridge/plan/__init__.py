"""Finds the obstacles to a migration from limits to claims, in a cluster or in dumps of it. It changes nothing."""
