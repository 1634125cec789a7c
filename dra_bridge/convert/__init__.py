"""Rewrites manifests from `limits` to claims, and back. All other text of a manifest stays unchanged."""
