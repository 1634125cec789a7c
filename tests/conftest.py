"""What holds for all tests: hypothesis judges what is computed, not how long a loaded machine takes for it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("quick", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=200)  # tox -e explore
settings.load_profile("quick")
