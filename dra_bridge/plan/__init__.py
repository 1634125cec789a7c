"""Finds obstacles to a migration from `limits` to claims, in a cluster or in dumps of a cluster. Changes nothing."""
