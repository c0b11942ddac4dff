"""srt/runtime_context.py of SGLang 0.5.23: settings that raise until they are published (config_bag, line
1065), and process groups that raise until they are set (ParallelContext._read, line 377)."""

from contextlib import contextmanager
from types import SimpleNamespace

_FIELDS = {"tp_group"}


class ParallelContext:
    def __init__(self):
        self._values = {}

    def __getattr__(self, name):
        if name in self._values:
            return self._values[name]
        if name in _FIELDS:
            raise RuntimeError(f"parallel name {name!r} has not been written in this process.")
        raise AttributeError(f"ParallelContext has no {name!r}")

    def override_permanently(self, **values):
        self._values |= _known(values)

    @contextmanager
    def override(self, **values):
        saved = dict(self._values)
        self._values |= _known(values)
        try:
            yield self
        finally:
            self._values = saved


def _known(values):
    if unknown := set(values) - _FIELDS:
        raise ValueError(f"unknown parallel field(s): {sorted(unknown)}")
    return values


class RuntimeContext:
    def __init__(self):
        self._server_args = None

    def set_server_args(self, server_args):
        self._server_args = server_args

    @contextmanager
    def override_server_args(self, **fields):
        """Line 1177: settings of a model called "dummy", while the context lasts."""
        from .server_args import ServerArgs

        saved = self._server_args
        self._server_args = ServerArgs(**({"model_path": "dummy"} | fields))
        try:
            yield self._server_args
        finally:
            self._server_args = saved


_PARALLEL, _CONTEXT = ParallelContext(), RuntimeContext()


def get_context():
    return _CONTEXT


def get_parallel():
    return _PARALLEL


def get_server_args():
    if _CONTEXT._server_args is None:
        raise ValueError("Global server args is not set yet!")
    return _CONTEXT._server_args


def get_exec():
    """Line 1318. The defaults of the settings that the fused MoE reads."""
    if _CONTEXT._server_args is None:
        raise ValueError("config namespace 'exec' not published")
    return SimpleNamespace(
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )


def publish(server_args, *, role, hf_config=None, ranks=None):
    """Line 1489. The last one published counts."""
    _CONTEXT.set_server_args(server_args)
    return _CONTEXT
