"""Rewrites manifests: what containers ask for by limits becomes claims, and back; nothing else of the text changes."""
