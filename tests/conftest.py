"""What holds for every test: no test is judged by the speed of the machine it runs on."""

from hypothesis import HealthCheck, settings

settings.register_profile("gridctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gridctl")
