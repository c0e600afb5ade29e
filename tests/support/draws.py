"""How many examples a property test draws: few and always the same, or many random ones.

`make test` must give the same answer twice, so its draws are derandomized; `make soak` searches.
`make mutation` draws as `make test` does, and is content with the first example that fails.
"""

import os

from hypothesis import HealthCheck, Phase, settings

_PROFILES = {"many": "search", "first": "first"}
_IS_SEARCH = os.environ.get("GPUOPS_TEST_DRAWS") == "many"
_FEW = 40
_MANY = 1000
_SHARE = 4  # `make test` draws a fourth of what a test asks for


def load_profile() -> None:
    """Set what a property test does that says nothing of it."""
    # How long an example takes on a busy machine says nothing of what is tested.
    common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("same", derandomize=True, max_examples=_FEW, **common)
    settings.register_profile(
        "first", settings.get_profile("same"), phases=(Phase.explicit, Phase.generate)
    )
    settings.register_profile("search", max_examples=_MANY, **common)
    settings.load_profile(_PROFILES.get(os.environ.get("GPUOPS_TEST_DRAWS", ""), "same"))


def draws(n: int) -> int:
    """Return how many examples a test draws that asks for *n*."""
    return n * _SHARE if _IS_SEARCH else max(n // _SHARE, 10)
