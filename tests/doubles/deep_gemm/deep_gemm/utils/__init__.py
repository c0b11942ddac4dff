from . import layout, math
from .layout import *  # noqa: F403
from .math import *  # noqa: F403
