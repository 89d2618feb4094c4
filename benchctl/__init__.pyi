from benchctl.api import Profile as Profile
from benchctl.api import compare as compare
from benchctl.api import load_profile as load_profile
from benchctl.api import load_results as load_results

__version__: str
