"""As much of vLLM as its benchmark client is made of."""
