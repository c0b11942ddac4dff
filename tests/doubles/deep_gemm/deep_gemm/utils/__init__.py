from . import layout as layout
from . import math as math
from .layout import *  # noqa: F403
from .math import *  # noqa: F403
