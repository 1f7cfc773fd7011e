"""What holds for all tests: examples of hypothesis take as long as they take, on machines of any speed."""

from hypothesis import HealthCheck, settings

settings.register_profile("stele", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stele")
