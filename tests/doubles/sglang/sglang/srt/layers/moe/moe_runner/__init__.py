from .base import MoeRunnerConfig as MoeRunnerConfig
