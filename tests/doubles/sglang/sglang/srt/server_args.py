"""srt/server_args.py of SGLang 0.5.23, as little as a kernel's caller without a server needs."""

from . import runtime_context


class ServerArgs:
    """Lines of settings, of which `model_path` has no default."""

    def __init__(self, *, model_path):
        self.model_path = model_path


def set_global_server_args_for_scheduler(server_args):
    """Line 627."""
    runtime_context.publish(server_args, role="scheduler")
