from benchctl.api import (
    Profile as Profile,
    compare as compare,
    load_profile as load_profile,
    load_results as load_results,
)

__version__: str
