"""Publishes ResourceSlices: `desired` computes the slices, `plan` computes the writes, and `Publisher` writes."""
