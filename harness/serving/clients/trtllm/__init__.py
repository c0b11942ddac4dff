"""Result files of TensorRT-LLM's load generators."""
