"""Result files of SGLang's load generators."""
