"""Result files of vLLM's load generators."""
