from .entrypoint import *  # noqa: F403
